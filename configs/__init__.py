"""One file a config: a module whose `config` is what it trains."""
