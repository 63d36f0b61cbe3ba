package audit

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"postern/internal/store"
)

// lineTime is how the time of an entry is written: to the microsecond, as it
// is hashed.
const lineTime = "2006-01-02T15:04:05.000000Z"

// lineJSON is an entry as a line of an export.
type lineJSON struct {
	Seq     int64           `json:"seq"`
	At      string          `json:"at"`
	Project string          `json:"project"`
	Actor   string          `json:"actor"`
	Verb    Verb            `json:"verb"`
	Object  string          `json:"object"`
	Detail  json.RawMessage `json:"detail,omitempty"` // an object of strings
	// DetailText is the detail of an entry that is no such object, which only
	// somebody who wrote into the database can have made.
	DetailText *string `json:"detail_text,omitempty"`
	Prev       string  `json:"prev"` // hexadecimal
	Hash       string  `json:"hash"` // hexadecimal
}

// checkpointJSON is a signed checkpoint as a line of an export.
type checkpointJSON struct {
	Checkpoint string `json:"checkpoint"`
}

// canonical returns a detail as [Append] writes it, whoever has put spaces into
// it or its fields in another order since.
func canonical(detail []byte) (string, error) {
	var f map[string]string
	if err := json.Unmarshal(detail, &f); err != nil {
		return "", err
	}
	if f == nil {
		return "", errors.New("detail is null")
	}
	b, err := json.Marshal(f)
	return string(b), err
}

// MarshalLine returns e, recorded with hash, as a line of JSON without its end.
func MarshalLine(e Entry, hash Digest) ([]byte, error) {
	j := lineJSON{
		Seq: e.Seq, At: e.At.UTC().Format(lineTime), Project: e.Project, Actor: e.Actor, Verb: e.Verb, Object: e.Object,
		Prev: hex.EncodeToString(e.Prev[:]), Hash: hex.EncodeToString(hash[:]),
	}
	if c, err := canonical([]byte(e.Detail)); err == nil && c == e.Detail {
		j.Detail = json.RawMessage(c)
	} else {
		j.DetailText = &e.Detail
	}
	b, err := json.Marshal(j)
	if err != nil {
		return nil, fmt.Errorf("write entry %d: %w", e.Seq, err)
	}
	return b, nil
}

// ParseLine reads what [MarshalLine] wrote.
func ParseLine(b []byte) (e Entry, hash Digest, err error) {
	var j lineJSON
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields() // what is not hashed would look as if it were
	if err := dec.Decode(&j); err != nil {
		return e, hash, fmt.Errorf("read entry: %w", err)
	}
	if dec.More() {
		return e, hash, errors.New("read entry: more than one object in a line")
	}
	e = Entry{Seq: j.Seq, Project: j.Project, Actor: j.Actor, Verb: j.Verb, Object: j.Object}
	if e.At, err = time.Parse(lineTime, j.At); err != nil {
		return e, hash, fmt.Errorf("read entry %d: time %q: want it like %s", j.Seq, brief(j.At), lineTime)
	}
	switch {
	case j.DetailText != nil && j.Detail == nil:
		e.Detail = *j.DetailText
	case j.Detail != nil && j.DetailText == nil:
		if e.Detail, err = canonical(j.Detail); err != nil {
			return e, hash, fmt.Errorf("read entry %d: detail: %w", j.Seq, err)
		}
	default:
		return e, hash, fmt.Errorf("read entry %d: want a detail, or a detail_text", j.Seq)
	}
	for _, h := range []struct {
		name, text string
		to         *Digest
	}{{"prev", j.Prev, &e.Prev}, {"hash", j.Hash, &hash}} {
		sum, err := hex.DecodeString(h.text)
		if err != nil || len(sum) != len(h.to) {
			return e, hash, fmt.Errorf("read entry %d: %s: want %d hexadecimal digits", j.Seq, h.name, 2*len(h.to))
		}
		copy(h.to[:], sum)
	}
	return e, hash, nil
}

// MarshalCheckpoint returns a signed checkpoint as a line of JSON without its end.
func MarshalCheckpoint(signed []byte) ([]byte, error) {
	return json.Marshal(checkpointJSON{string(signed)})
}

// A Line is one of an export: an entry, or a checkpoint.
type Line struct {
	Number     int // from 1
	Entry      Entry
	Hash       Digest
	Checkpoint []byte // signed; nil in the line of an entry
	End        int64  // where the line ends, in bytes from the beginning
}

// maxLine bounds a line of an export, in bytes.
const maxLine = 1 << 20

// ReadExport calls f with each line of an export. The last line may lack its
// end and is left out then: whoever wrote it was interrupted.
func ReadExport(r io.Reader, f func(Line) error) error {
	br := bufio.NewReaderSize(r, maxLine)
	var l Line
	for {
		b, err := br.ReadSlice('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			return fmt.Errorf("read export: line %d has more than %d bytes", l.Number+1, maxLine)
		}
		if err != nil {
			return fmt.Errorf("read export: %w", err)
		}
		l = Line{Number: l.Number + 1, End: l.End + int64(len(b))}
		if len(bytes.TrimSpace(b)) == 0 {
			continue
		}
		var c checkpointJSON
		if bytes.HasPrefix(b, []byte(`{"checkpoint"`)) {
			if err := json.Unmarshal(b, &c); err != nil {
				return fmt.Errorf("read export: line %d: %w", l.Number, err)
			}
			l.Checkpoint = []byte(c.Checkpoint)
		} else if l.Entry, l.Hash, err = ParseLine(b); err != nil {
			return fmt.Errorf("read export: line %d: %w", l.Number, err)
		}
		if err := f(l); err != nil {
			return err
		}
	}
}

// exportPage is how many entries are read in one transaction: an export of
// years must not keep one open, behind which nothing can be cleaned up.
const exportPage = 1000

// Export calls write with each entry that q selects, the oldest first, and
// returns the number of the last. What is appended meanwhile is left out, so
// that it ends. q.After resumes one; q.Before and q.Limit are not heeded.
func Export(ctx context.Context, db *store.DB, q Query, write func(Entry, Digest) error) (last int64, err error) {
	var end int64
	err = db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select coalesce(max(seq), 0) from audit_entry`, nil, &end)
	})
	if err != nil {
		return 0, fmt.Errorf("export audit: %w", err)
	}
	last = q.After
	q.Limit = exportPage
	for last < end {
		// A span of numbers at a time, not of matches: a rare verb would
		// otherwise be looked for through the whole record in one transaction.
		q.After, q.Before = last, min(last+exportPage, end)+1
		err := db.View(ctx, func(tx *store.Tx) error {
			return q.each(ctx, tx, "asc", write)
		})
		if err != nil {
			return last, err
		}
		last = q.Before - 1
	}
	return last, nil
}

// After calls f with up to limit entries after seq, in order, and returns how
// many that were.
func After(ctx context.Context, db *store.DB, seq int64, limit int, f func(Entry, Digest) error) (n int, err error) {
	err = db.View(ctx, func(tx *store.Tx) error {
		n, err = page(ctx, tx, seq, limit, f)
		return err
	})
	return n, err
}
