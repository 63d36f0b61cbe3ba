package audit

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/store"
)

// A Proof proves that an entry is in the record, to somebody who has only the public
// key. Its file is a c2sp.org/tlog-proof whose extra data is the entry as a line of an
// export.
type Proof struct {
	Entry      Entry
	Recorded   Digest           // the hash that was recorded with it
	Hashes     tlog.RecordProof // from the entry's leaf to the root
	Checkpoint []byte           // signed
}

const (
	proofHeader = "c2sp.org/tlog-proof@v1"
	// maxProof bounds a proof's file, in bytes; a tree has at most 63 levels.
	maxProof  = 2 << 20
	maxHashes = 63
)

// ProveEntry returns the proof of entry seq by the smallest checkpoint that
// covers it, as part of tx. The entry must be of the project, unless that is
// empty. It returns [store.ErrNotFound] or [ErrNoCheckpoint].
func ProveEntry(ctx context.Context, tx *store.Tx, project string, seq int64) (p Proof, err error) {
	p.Entry, p.Recorded, err = Read(ctx, tx, project, seq)
	if err != nil {
		return p, err
	}
	s, err := Covering(ctx, tx, seq)
	if err != nil {
		return p, fmt.Errorf("prove entry %d: %w", seq, err)
	}
	p.Checkpoint = s.Note
	p.Hashes, err = Prove(ctx, tx, seq, s.Size)
	return p, err
}

// Read returns entry seq and the hash that was recorded with it, as part of tx.
// It must be of the project, unless that is empty.
func Read(ctx context.Context, tx *store.Tx, project string, seq int64) (e Entry, hash Digest, err error) {
	_, err = page(ctx, tx, seq-1, 1, func(found Entry, h Digest) error {
		e, hash = found, h
		return nil
	})
	if err != nil {
		return e, hash, err
	}
	if e.Seq != seq || seq < 1 || project != "" && e.Project != project {
		return Entry{}, Digest{}, fmt.Errorf("entry %d: %w", seq, store.ErrNotFound)
	}
	return e, hash, nil
}

// Marshal encodes p as a c2sp.org/tlog-proof.
func (p Proof) Marshal() ([]byte, error) {
	line, err := MarshalLine(p.Entry, p.Recorded)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\nextra %s\nindex %d\n", proofHeader, base64.StdEncoding.EncodeToString(line), p.Entry.Seq-1)
	for _, h := range p.Hashes {
		fmt.Fprintln(&b, base64.StdEncoding.EncodeToString(h[:]))
	}
	b.WriteByte('\n')
	b.Write(p.Checkpoint)
	return b.Bytes(), nil
}

// ParseProof parses a proof that [Proof.Marshal] wrote. It verifies nothing: see
// [Proof.Check].
func ParseProof(data []byte) (p Proof, err error) {
	if len(data) > maxProof {
		return p, fmt.Errorf("read proof: more than %d bytes", maxProof)
	}
	head, checkpoint, ok := strings.Cut(string(data), "\n\n")
	lines := strings.Split(head, "\n")
	if !ok || len(lines) < 3 || lines[0] != proofHeader {
		return p, fmt.Errorf("read proof: want %s, extra, index, hashes, an empty line and a checkpoint", proofHeader)
	}
	extra, ok := strings.CutPrefix(lines[1], "extra ")
	line, err := base64.StdEncoding.Strict().DecodeString(extra)
	if !ok || err != nil {
		return p, errors.New("read proof: extra: want an entry in base64")
	}
	if p.Entry, p.Recorded, err = ParseLine(line); err != nil {
		return p, fmt.Errorf("read proof: %w", err)
	}
	index, ok := strings.CutPrefix(lines[2], "index ")
	n, err := strconv.ParseInt(index, 10, 64)
	if !ok || err != nil || n < 0 || strconv.FormatInt(n, 10) != index {
		return p, errors.New("read proof: index: want a number")
	}
	if n != p.Entry.Seq-1 {
		return p, fmt.Errorf("read proof: the index is that of entry %d, but extra holds entry %d", n+1, p.Entry.Seq)
	}
	if len(lines)-3 > maxHashes {
		return p, fmt.Errorf("read proof: more than %d hashes", maxHashes)
	}
	for _, l := range lines[3:] {
		h, err := parseHash(l)
		if err != nil {
			return p, fmt.Errorf("read proof: %w", err)
		}
		p.Hashes = append(p.Hashes, h)
	}
	p.Checkpoint = []byte(checkpoint)
	return p, nil
}

// ErrProof means that a proof does not prove what it claims.
var ErrProof = errors.New("the proof does not hold")

// Check returns nil if p proves that its entry is in the record whose checkpoints
// keys sign, and the checkpoint. The proof covers every field of the entry, since all
// are hashed.
func (p Proof) Check(keys note.Verifiers) (Kept, error) {
	k, err := Keep("the checkpoint in the proof", p.Checkpoint, keys)
	if err != nil {
		return Kept{}, err
	}
	chain, leaf, _ := p.Entry.hashes(nil)
	if chain != p.Recorded {
		return k, fmt.Errorf("entry %d has another hash than the one beside it: %w", p.Entry.Seq, ErrProof)
	}
	if p.Entry.Seq < 1 || p.Entry.Seq > k.Size {
		return k, fmt.Errorf("the checkpoint covers %d entries, and this is entry %d: %w", k.Size, p.Entry.Seq, ErrProof)
	}
	if err := tlog.CheckRecord(p.Hashes, k.Size, k.Root, p.Entry.Seq-1, leaf); err != nil {
		return k, fmt.Errorf("entry %d is not in the tree that was signed: %w", p.Entry.Seq, ErrProof)
	}
	return k, nil
}
