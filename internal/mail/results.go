package mail

// A Check is what one way of proving a sender said about a message. The zero
// Check means that it was not tried.
type Check struct {
	// Result is a word of RFC 8601 section 2.7: none, pass, fail, softfail,
	// neutral, policy, temperror or permerror.
	Result string `json:"result,omitempty"`
	Domain string `json:"domain,omitempty"` // that the result is about
	Detail string `json:"detail,omitempty"` // why, for a person; printable
}

// Results say who a message that arrived was proved to be from.
type Results struct {
	SPF   Check `json:"spf"`   // RFC 7208, of the envelope's sender
	DKIM  Check `json:"dkim"`  // RFC 6376, the best signature
	DMARC Check `json:"dmarc"` // RFC 9989, of the From field
	ARC   Check `json:"arc"`   // RFC 8617, the chain
	// Policy is what the domain of the From field asks for when DMARC fails:
	// none, quarantine, reject, or empty where it asks for nothing.
	Policy string `json:"policy,omitempty"`
}

// Authors returns the addresses of a message's From fields just as [Parse]
// reads and shows them, how many such fields there are, and whether all of
// them are proper lists. What is proved about a sender must be proved about
// what is shown.
func Authors(raw []byte) (list []Address, n int, proper bool) {
	fields, _, _, err := splitHeader(raw)
	if err != nil {
		return nil, 0, false
	}
	unfold(fields)
	proper = true
	for _, f := range fields {
		if f.is("From") && len(list) <= 1000 {
			as, ok := parseList(f.value)
			list, n, proper = append(list, as...), n+1, proper && ok
		}
	}
	return list, n, proper
}
