"""Configuration of TensorRT-LLM: layers of arguments, and checks of them before anything is loaded."""
