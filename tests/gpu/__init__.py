"""What only a GPU shows; ``make gpu`` runs it."""
