"""Not installed: how the shipped models were trained and examined, and experiments of our own."""
