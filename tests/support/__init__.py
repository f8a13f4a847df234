"""What tests share: the leak check, processes that start fast, brokers and workers."""
