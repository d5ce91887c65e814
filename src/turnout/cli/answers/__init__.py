"""What `turnout inspect` answers: of each question the answer as JSON values, and the lines that tell it."""
