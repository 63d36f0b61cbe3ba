package bridge

import (
	"encoding/json"
	"os"
)

// Attach returns the paths of the files that a call with these attachments reads.
func Attach(root *os.Root, attachments string) ([]string, error) {
	b := &Bridge{conf: Config{Root: root}}
	files, err := b.attach(map[string]json.RawMessage{"attachments": json.RawMessage(attachments)})
	var names []string
	for _, f := range files {
		names = append(names, f.name)
	}
	return names, err
}
