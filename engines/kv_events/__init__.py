"""KV-cache events of engines that publish them over ZMQ (vLLM, SGLang): socket, wire format, translation to log events."""
