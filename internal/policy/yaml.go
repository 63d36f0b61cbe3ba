package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// YAML is read node by node and not into Go structs: each error names the line
// and the field as the writer knows it, a field that does not exist is an
// error, and what makes YAML a risk, aliases that unfold without end, tags and
// merges, is not there at all.

// fields are the keys of a mapping with what reads their values.
type fields map[string]func(n *yaml.Node, path string) error

// parseYAML returns the root of the one document in text.
func parseYAML(text []byte) (*yaml.Node, error) {
	n, err := Tree(text, MaxText)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDocument, err)
	}
	return n, nil
}

// Tree returns the root of the only YAML document in text. It refuses text of more than most
// bytes, and text with invisible characters, which would mislead a reader. Nodes may have
// aliases, anchors and tags; the caller refuses them.
func Tree(text []byte, most int) (*yaml.Node, error) {
	switch {
	case len(text) > most:
		return nil, fmt.Errorf("has %d bytes; at most %d are allowed", len(text), most)
	case !utf8.Valid(text) || bytes.IndexByte(text, 0) >= 0:
		return nil, errors.New("is not text in UTF-8")
	case unseen(text) >= 0:
		at := unseen(text)
		r, _ := utf8.DecodeRune(text[at:])
		return nil, fmt.Errorf("line %d: has the character U+%04X, which is invisible or an unusual line break", 1+bytes.Count(text[:at], []byte("\n")), r)
	case nested(text):
		return nil, errors.New("is nested too deeply")
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc, more yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && len(doc.Content) == 0 {
		return nil, errors.New("line 1: is empty")
	}
	if err != nil {
		return nil, errors.New(clip(strings.TrimPrefix(err.Error(), "yaml: ")))
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the document")
	}
	return doc.Content[0], nil
}

// unseen returns where the first character of text is that a person who reads it
// does not see, or -1. The attack: a rule behind a comment, after what YAML takes
// for the end of the line (U+2028, U+0085, a lone carriage return) and a page does
// not, which whoever approves the document takes for a part of the comment; or
// words that are shown in another order than they are read in.
func unseen(text []byte) int {
	for i, r := range string(text) {
		switch {
		case r == '\n' || r == '\t' || r == '\r' && i+1 < len(text) && text[i+1] == '\n':
		case unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp):
			return i
		}
	}
	return -1
}

// nested reports whether text opens more brackets than any document of ours
// does. The attack: the parser calls itself for each.
func nested(text []byte) bool {
	const most = 2000
	return bytes.Count(text, []byte("[")) > most+bytes.Count(text, []byte("]")) || bytes.Count(text, []byte("{")) > most+bytes.Count(text, []byte("}"))
}

func wrong(n *yaml.Node, path, format string, args ...any) error {
	if path == "" {
		path = "document"
	}
	return fmt.Errorf("%w: line %d: %s: %s", ErrDocument, n.Line, path, fmt.Sprintf(format, args...))
}

// plain refuses what no document of ours needs.
func plain(n *yaml.Node, path string) error {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return wrong(n, path, "anchors and aliases are not allowed")
	}
	if n.Style&yaml.TaggedStyle != 0 {
		return wrong(n, path, "tags are not allowed")
	}
	return nil
}

// mapping reads n's keys, each at most once.
func mapping(n *yaml.Node, path string, f fields) error {
	if err := plain(n, path); err != nil {
		return err
	}
	if n.Kind != yaml.MappingNode {
		return wrong(n, path, "must be fields with values, such as %s: …", slices.Min(slices.Collect(maps.Keys(f))))
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if err := plain(key, path); err != nil {
			return err
		}
		name := key.Value
		read, ok := f[name]
		if key.Kind != yaml.ScalarNode || !ok {
			return wrong(key, join(path, clip(name)), "there is no such field; there are %s", strings.Join(slices.Sorted(maps.Keys(f)), ", "))
		}
		if seen[name] {
			return wrong(key, join(path, name), "stands here twice")
		}
		seen[name] = true
		if err := read(value, join(path, name)); err != nil {
			return err
		}
	}
	return nil
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// sequence reads the items of n, of which there may be most.
func sequence(n *yaml.Node, path string, most int, read func(n *yaml.Node, path string) error) error {
	if err := plain(n, path); err != nil {
		return err
	}
	if n.Kind != yaml.SequenceNode {
		return wrong(n, path, "must be a list")
	}
	if len(n.Content) > most {
		return wrong(n, path, "has %d entries; at most %d are allowed", len(n.Content), most)
	}
	for i, item := range n.Content {
		if err := read(item, path+"["+strconv.Itoa(i)+"]"); err != nil {
			return err
		}
	}
	return nil
}

// text1 reads a text of 1 to most bytes.
func text1(n *yaml.Node, path string, most int) (string, error) {
	s, err := text0(n, path, most)
	if err == nil && strings.TrimSpace(s) == "" {
		err = wrong(n, path, "is empty")
	}
	return s, err
}

// text0 reads a text of at most most bytes. A number is taken as it is written.
func text0(n *yaml.Node, path string, most int) (string, error) {
	if err := plain(n, path); err != nil {
		return "", err
	}
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return "", wrong(n, path, "must be a text")
	}
	if len(n.Value) > most {
		return "", wrong(n, path, "has %d bytes; at most %d are allowed", len(n.Value), most)
	}
	if i := strings.IndexFunc(n.Value, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' || r == 0x7f }); i >= 0 {
		return "", wrong(n, path, "contains a control character")
	}
	return n.Value, nil
}

var decimal = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(0|[1-9][0-9]{0,17})$`) })

// whole reads a number from 0 up.
func whole(n *yaml.Node, path string) (int64, error) {
	if err := plain(n, path); err != nil {
		return 0, err
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || !decimal().MatchString(n.Value) {
		return 0, wrong(n, path, "must be a whole number")
	}
	return strconv.ParseInt(n.Value, 10, 64)
}

func number(n *yaml.Node, path string, least, most int64) (int, error) {
	v, err := whole(n, path)
	if err == nil && (v < least || v > most) {
		if least == most {
			return 0, wrong(n, path, "is %d; must be %d", v, least)
		}
		err = wrong(n, path, "is %d; must be %d to %d", v, least, most)
	}
	return int(v), err
}

func boolean(n *yaml.Node, path string) (bool, error) {
	if err := plain(n, path); err != nil {
		return false, err
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" {
		return false, wrong(n, path, "must be true or false")
	}
	return n.Value == "true", nil
}
