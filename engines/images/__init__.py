"""Images for engines of Python libraries: the rule by which a model's image tokens are counted, and checks of prompts with images."""
