"""The division of a batch: whether its samples influence one another, and what is gathered where they do."""
