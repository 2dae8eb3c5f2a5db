"""What an instance is made of: its ranks, the file that describes them, and where experts go."""
