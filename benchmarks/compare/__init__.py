"""nc10d beside other libraries, in one run."""
