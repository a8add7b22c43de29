"""Generated images: from a prompt to the files that a worker made, in the response, in events, or at a URL."""
