package scan

import (
	_ "embed"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"postern/internal/extract"
)

//go:embed lexicon.txt
var lexiconText string

// A concept is what rules speak of: many words of many languages.
type concept uint8

const (
	none concept = iota
	override
	prior
	instr
	ai
	address
	newtask
	persona
	authority
	marker
	closer
	sendv
	secret
	private
	tool
	run
	shell
	toolcall
	destroy
	secrecy
	meta
	neg
	urgent
	login
	dest // an address or URL; not of the lexicon
	concepts
)

var conceptNames = map[string]concept{
	"override": override, "prior": prior, "instr": instr, "ai": ai, "address": address, "newtask": newtask, "persona": persona, "authority": authority,
	"marker": marker, "closer": closer, "sendv": sendv, "secret": secret, "private": private, "tool": tool, "run": run, "shell": shell, "toolcall": toolcall,
	"destroy": destroy, "secrecy": secrecy, "meta": meta, "neg": neg, "urgent": urgent, "login": login,
}

// A node of the trie: the lexicon, letter by letter.
type node struct {
	next  []edge
	whole uint32 // concepts of entries that end here, whole words; a bit each
	stem  uint32 // concepts of entries that end here, beginnings of words
}

type edge struct {
	r  rune
	to int32
}

type trie struct {
	nodes []node
	first map[rune]int32 // edges of the root, which has many
}

// lexicon is built when the first mail is scanned: each part of a sandbox is
// this program and would otherwise build it as it starts.
var lexicon = sync.OnceValue(func() *trie {
	t := &trie{nodes: make([]node, 1, 1<<15), first: map[rune]int32{}}
	for line := range strings.Lines(lexiconText) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, list, _ := strings.Cut(line, ":")
		c := conceptNames[name]
		if c == none {
			panic("lexicon: unknown concept " + name) // unreachable: a test reads it
		}
		for entry := range strings.SplitSeq(list, " | ") {
			t.add(entry, c)
		}
	}
	return t
})

func (t *trie) add(entry string, c concept) {
	entry, isStem := strings.CutSuffix(strings.TrimSpace(entry), "*")
	folded := fold(entry).text
	if folded == "" {
		return
	}
	at := int32(0)
	for _, r := range folded {
		at = t.step(at, r)
	}
	n := &t.nodes[at]
	if isStem {
		n.stem |= 1 << c
	} else {
		n.whole |= 1 << c
	}
}

func (t *trie) step(at int32, r rune) int32 {
	if to := t.walk(at, r); to > 0 {
		return to
	}
	to := int32(len(t.nodes))
	t.nodes = append(t.nodes, node{})
	if at == 0 {
		t.first[r] = to
	} else {
		t.nodes[at].next = append(t.nodes[at].next, edge{r, to})
	}
	return to
}

// walk returns the node after at by r, or 0.
func (t *trie) walk(at int32, r rune) int32 {
	if at == 0 {
		return t.first[r]
	}
	for _, e := range t.nodes[at].next {
		if e.r == r {
			return e.to
		}
	}
	return 0
}

// A hit is where a concept stands in a folded text.
type hit struct {
	at, end int // bytes
	c       concept
}

// maxHits bounds the hits of one text, and so the memory and time that they
// take. A text with more is itself a finding: no letter to anybody has as many.
const maxHits = 50_000

// find returns the hits in a folded text, by where they begin. Time is linear:
// an entry is at most some 40 letters long.
func (t *trie) find(text string) []hit {
	var hits []hit
	prev := rune(' ')
	begins := true // a word, or what may begin one, begins here
	for i := 0; i < len(text) && len(hits) < maxHits; {
		r, n := utf8.DecodeRuneInString(text[i:])
		if begins = !extract.Letter(r) || !extract.Letter(prev) || unspaced(r) || begins && proclitic(prev); begins {
			hits = t.from(text, i, hits)
		}
		prev = r
		i += n
	}
	return hits
}

// from appends the longest hit of each concept that begins at i.
func (t *trie) from(text string, i int, hits []hit) []hit {
	at := int32(0)
	first := len(hits)
	for j := i; j < len(text); {
		r, n := utf8.DecodeRuneInString(text[j:])
		if r == '\n' || r == '_' && j > i && t.walk(at, '_') == 0 {
			r = ' '
		}
		if at = t.walk(at, r); at == 0 {
			break
		}
		j += n
		nd := &t.nodes[at]
		set := nd.stem
		if nd.whole != 0 {
			after, _ := utf8.DecodeRuneInString(text[j:])
			if j >= len(text) || !extract.Letter(after) || !extract.Letter(r) || unspaced(r) || unspaced(after) {
				set |= nd.whole
			}
		}
		for c := concept(1); set>>c != 0; c++ {
			if set&(1<<c) == 0 {
				continue
			}
			if k := slices.IndexFunc(hits[first:], func(h hit) bool { return h.c == c }); k >= 0 {
				hits[first+k].end = j
			} else {
				hits = append(hits, hit{i, j, c})
			}
		}
	}
	return hits
}

// unspaced says whether words of r's script stand without spaces between them,
// or with endings that run on.
func unspaced(r rune) bool {
	return r >= 0x2e80 && (unicode.In(r, unicode.Han, unicode.Hiragana, unicode.Katakana) || hangul(r)) || r >= 0xe00 && r < 0xe80
}

// proclitic are the Arabic letters that are written onto the word that follows.
func proclitic(r rune) bool { return r == 'و' || r == 'ف' || r == 'ب' || r == 'ل' || r == 'ا' }
