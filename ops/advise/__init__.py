"""`headwater advise`: a layout of workers for a model, GPUs and a trace, by what-if."""
