"""The load generator: requests sent to any server of OpenAI's API, and what came of them."""
