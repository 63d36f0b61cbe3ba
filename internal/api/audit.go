package api

import (
	"encoding/json"
	"time"
)

// An AuditEntry is one entry of the audit log.
type AuditEntry struct {
	Seq    int64           `json:"seq"` // 1 for the first
	At     time.Time       `json:"at"`
	Actor  string          `json:"actor"`  // a principal: "person:ann"
	Verb   string          `json:"verb"`   // "action.approve"
	Object string          `json:"object"` // id of what it is about; may be empty
	Detail json.RawMessage `json:"detail"`
	Prev   string          `json:"prev"` // hash of the entry before, hexadecimal
	Hash   string          `json:"hash"` // of the entry as it is stored now, hexadecimal
}

// An AuditList is one page of entries, the newest first.
type AuditList struct {
	Entries []AuditEntry `json:"entries"`
	Next    *int64       `json:"next"` // pass it as before to get the next page; nil on the last
}

// A Checkpoint is a signed size and root of the audit log. The note in
// Checkpoint is what is signed; the other fields repeat its content.
type Checkpoint struct {
	Size       int64     `json:"size"` // entries
	Root       string    `json:"root"` // of the tree over them, base64
	At         time.Time `json:"at"`
	Checkpoint string    `json:"checkpoint"` // c2sp.org/tlog-checkpoint
}

// A Proof shows that the audit log of a size contains an entry (Seq), or that
// it continues the log of a smaller size (From).
type Proof struct {
	Seq        int64    `json:"seq,omitempty"`
	From       int64    `json:"from,omitempty"`
	Size       int64    `json:"size"`
	Hashes     []string `json:"hashes"`               // base64
	Checkpoint string   `json:"checkpoint,omitempty"` // of that size
	Proof      string   `json:"proof,omitempty"`      // c2sp.org/tlog-proof; of an entry
}
