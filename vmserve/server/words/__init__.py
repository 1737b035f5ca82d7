"""What a request says, read and checked, and what replies say."""
