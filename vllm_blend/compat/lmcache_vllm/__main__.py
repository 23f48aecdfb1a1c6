"""`python -m lmcache_vllm`: see vllm_blend/lmcache/cli.py."""

from vllm_blend.lmcache.cli import main

if __name__ == "__main__":
    main()
