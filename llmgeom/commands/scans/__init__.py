"""A scan from request to record, by the order of events: request, plan, samples, perform; its price."""
