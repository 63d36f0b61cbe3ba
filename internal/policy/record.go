package policy

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// RecordInput is the word of the key record for digests of what clients send to processes
// and terminals in sandboxes. Without it the record has the number of bytes alone.
const RecordInput = "input"

// recordable are the words of the key record.
func recordable() []string { return []string{RecordInput} }

// Records reports whether the document has a word in its key record.
func (d *Document) Records(what string) bool { return slices.Contains(d.record, what) }

// parseRecord reads the key record of a document.
func (d *Document) parseRecord(n *yaml.Node, path string) error {
	return sequence(n, path, len(recordable()), func(n *yaml.Node, path string) error {
		what, err := text1(n, path, maxID)
		switch {
		case err != nil:
			return err
		case !slices.Contains(recordable(), what): // it would be missing, although the author relies on it
			return wrong(n, path, "%q: must be one of %s", clip(what), strings.Join(recordable(), ", "))
		case d.Records(what):
			return wrong(n, path, "%q is in the list already", what)
		}
		d.record = append(d.record, what)
		return nil
	})
}
