"""The canary: a new drafter on a share of the requests, promoted or rolled back by what is measured.

Under an exact rule the text does not depend on who drafts, so a canary risks speed alone.

    options    what the operator asks for            assign     which request is in which arm
    evidence   pairs of requests, and the test       trial      one canary: options, counts, verdict
    store      the state on disk, shared by replicas
    conductor  runs a canary in a server: assigns, observes, decides, and says why
"""
