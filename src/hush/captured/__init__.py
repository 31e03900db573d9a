"""The step as one CUDA graph, compiled or not."""
