"""What processes of engines have in common: private folders, their heap, their event loop, and their first failure."""
