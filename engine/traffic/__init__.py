"""What comes to an instance: lengths of prompts. Without torch; imports errors and files only."""
