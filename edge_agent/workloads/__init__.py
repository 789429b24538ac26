"""What is trained while a board is measured: the shipped networks, and how to find one of your own."""
