"""The published baseline, PowerTrain, and the network that it transfers."""
