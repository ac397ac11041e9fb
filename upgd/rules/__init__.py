"""Update rules as functions of scalars, whatever executes them. Imports nothing of the rest."""
