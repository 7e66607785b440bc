"""The same game, environment and channel with the real stack: TRL's AsyncGRPO and vLLM."""
