"""`kvasir batch`: files of requests for a running gateway, which it is asked over HTTP as any client would."""
