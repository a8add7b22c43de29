"""Media intake: URLs and bytes that clients name become checked, decoded items, in processes of their own."""
