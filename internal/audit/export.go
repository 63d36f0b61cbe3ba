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

// lineTime is the format of an entry's time. It has microseconds, like the hashed time.
const lineTime = "2006-01-02T15:04:05.000000Z"

// lineJSON is the JSON encoding of an entry, one line of an export.
type lineJSON struct {
	Seq     int64           `json:"seq"`
	At      string          `json:"at"`
	Project string          `json:"project"`
	Actor   string          `json:"actor"`
	Verb    Verb            `json:"verb"`
	Object  string          `json:"object"`
	Detail  json.RawMessage `json:"detail,omitempty"` // an object of strings
	// DetailText replaces Detail if that is not an object of strings in canonical
	// form. Only somebody who wrote to the database can have made such an entry, and
	// the export must show it unchanged.
	DetailText *string `json:"detail_text,omitempty"`
	Prev       string  `json:"prev"` // hexadecimal
	Hash       string  `json:"hash"` // hexadecimal
}

// checkpointJSON is the JSON encoding of a signed checkpoint, one line of an export.
type checkpointJSON struct {
	Checkpoint string `json:"checkpoint"`
}

// canonical returns a detail in the form that [Append] writes and hashes: sorted keys,
// no spaces. A JSON tool between export and verification may have changed both.
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

// MarshalLine encodes e, which was recorded with hash, as a line of JSON without the
// line end.
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

// ParseLine decodes a line that [MarshalLine] wrote. It does not verify the hash.
func ParseLine(b []byte) (e Entry, hash Digest, err error) {
	var j lineJSON
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields() // the attack: an added field, which no hash covers, looks genuine
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

// MarshalCheckpoint encodes a signed checkpoint as a line of JSON without the line end.
func MarshalCheckpoint(signed []byte) ([]byte, error) {
	return json.Marshal(checkpointJSON{string(signed)})
}

// A Line is a line of an export: an entry or a checkpoint.
type Line struct {
	Number     int // from 1
	Entry      Entry
	Hash       Digest
	Checkpoint []byte // signed; nil if the line is an entry
	End        int64  // offset of the line's end in the export, in bytes
}

// maxLine bounds a line of an export, in bytes.
const maxLine = 1 << 20

// ReadExport calls f with each line of an export. It ignores a last line without a
// line end, which an interrupted export leaves. An error of f ends the reading.
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

// exportPage is the number of entries read in one transaction. A long export must not
// keep one open: the database could not clean up old row versions meanwhile.
const exportPage = 1000

// Export calls write with each entry that q selects, the oldest first, and returns the
// number of the last entry read. It omits entries appended during the export, so that
// it ends. q.After resumes an export. q.Before and q.Limit are ignored.
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
		// Page by entry numbers, not by matches: a rare verb would scan the whole record
		// in one transaction.
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

// After calls f with up to limit entries after seq, in order, and returns their
// number.
func After(ctx context.Context, db *store.DB, seq int64, limit int, f func(Entry, Digest) error) (n int, err error) {
	err = db.View(ctx, func(tx *store.Tx) error {
		n, err = page(ctx, tx, seq, limit, f)
		return err
	})
	return n, err
}
