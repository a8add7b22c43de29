"""Media for engines of Python libraries: the rules by which a model's tokens of images, videos and audio are counted, and checks of prompts with them."""
