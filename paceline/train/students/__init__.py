"""Students: drafters while they are trained, one file per kind, with their loss, initial weights and file formats."""
