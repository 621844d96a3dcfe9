"""Files of other trainers, and the programs that train what they say: these trainers' own."""
