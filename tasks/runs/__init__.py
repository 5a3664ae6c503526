"""What lies in the home folder, and what of it nobody needs. Imports no torch."""
