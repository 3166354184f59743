"""The checks of an annotation file, by what they look at; ``findings.check_file`` runs them all."""
