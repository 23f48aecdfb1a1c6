"""GGUF files, as llama.cpp has them: config, tokenizer and weights in one file. The weights are dequantized at load.

Unlike transformers' own reader, which leaves out what it does not know, this one accounts for every tensor, and reads
the RoPE scaling and the pre-tokenizer that a file states; tests compare the two where they should agree.
"""
