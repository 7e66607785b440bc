"""What a bucket holds and what it means: keys, records, the chain of versions, routes, policies, retention."""
