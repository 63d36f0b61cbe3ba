package api

import "time"

// A DomainState says whether a domain is the project's.
type DomainState string

// The states of a [Domain].
const (
	DomainPending  DomainState = "pending"  // claimed, not proved
	DomainVerified DomainState = "verified" // proved
	DomainDegraded DomainState = "degraded" // proved, and other records are missing
	DomainLost     DomainState = "lost"     // its proof is gone: it receives for a time, and does not send
)

// A Domain is a domain that the project brought for its inboxes.
type Domain struct {
	ID          string      `json:"id"`
	Domain      string      `json:"domain"`  // in its ASCII form
	Unicode     string      `json:"unicode"` // as people write it
	State       DomainState `json:"state"`
	Problem     string      `json:"problem"`     // for people; empty: none
	VerifiedAt  *time.Time  `json:"verified_at"` // nil: never
	CheckedAt   *time.Time  `json:"checked_at"`  // nil: never
	NextCheckAt *time.Time  `json:"next_check_at"`
	CreatedAt   time.Time   `json:"createdAt"` // spelled as LobsterMail's client reads it
}

// A DomainList is the domains of the project, by name.
type DomainList struct {
	Domains []Domain `json:"data"`
}

// A NewDomain claims a domain.
type NewDomain struct {
	Domain string `json:"domain"` // ASCII or Unicode
}

// A RemovedDomain answers the removal of a domain.
type RemovedDomain struct {
	ID      string `json:"id"`
	Domain  string `json:"domain"`
	Deleted bool   `json:"deleted"` // always true
}

// A DomainRecord is a DNS record to publish, and what the last check found.
type DomainRecord struct {
	Kind     string   `json:"kind"` // ownership, mx, spf, dkim, dmarc, mta_sts or tls_rpt
	Type     string   `json:"type"` // TXT or MX
	Name     string   `json:"name"` // fully qualified, without the last dot
	Value    string   `json:"value"`
	Priority int      `json:"priority,omitempty"` // of an MX record
	Need     string   `json:"need"`               // required, wanted or optional
	Why      string   `json:"why"`                // for people
	Result   string   `json:"result"`             // unchecked, ok, warning, missing, wrong or unreachable
	Found    []string `json:"found,omitempty"`    // what DNS has; others wrote it
	Detail   string   `json:"detail,omitempty"`   // for people: what is wrong, and what to do
}

// DomainRecords are the records of a domain.
type DomainRecords struct {
	Domain       string         `json:"domain"`
	State        DomainState    `json:"state"`
	CheckedAt    *time.Time     `json:"checked_at"` // nil: never
	Records      []DomainRecord `json:"records"`
	MTASTSPolicy string         `json:"mta_sts_policy"` // to serve over HTTPS (RFC 8461); may be empty
}
