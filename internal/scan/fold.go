package scan

import (
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"postern/internal/extract"
)

// A folding is a text as it looks, not as it is written: lower case, without
// accents and unseen characters, with letters that look like Latin ones turned
// into those. It is the same for mail and for the lexicon, so that a Russian
// word in the lexicon becomes the same half-Latin string as one in a mail.
type folding struct {
	text string

	tags      string // written in tag characters, which nobody sees
	selectors string // bytes hidden in variation selectors
	unseen    int    // zero-width characters within words
	overrides int    // characters that reverse the reading direction
	mixed     int    // words that mix Latin letters with lookalikes of other scripts
	styled    int    // letters of mathematical, enclosed and other styled alphabets
	stacked   int    // combining marks beyond what a letter of a language has
	flipped   int    // letters turned upside down
}

// fold returns how s looks. Its time and its result are linear in s: a rune
// becomes at most 16 bytes.
func fold(s string) folding {
	f := folder{table: letters(), cache: map[rune]string{}}
	f.out.Grow(len(s))
	f.run(s)
	f.endWord()
	f.tags = f.tagged.String()
	f.endSelectors()
	f.text = f.out.String()
	return f.folding
}

// Plain returns s as it looks: in lower case, without accents, with letters that look like
// Latin ones turned into those.
func Plain(s string) string { return fold(s).text }

type folder struct {
	folding
	out    strings.Builder
	tagged strings.Builder
	table  *letterTables
	cache  map[rune]string // what NFKD makes of a rune; bounded by what Unicode has

	prev    rune // the last that was not dropped
	space   bool // white space is due
	newline bool
	marks   int // combining marks since the last letter
	inFlag  bool
	flagged []rune // of an emoji flag's tags
	picked  []byte // of variation selectors in a row

	latin, alike bool // the word has Latin letters; it has lookalikes of other scripts
	lengthOfWord int
	joined       int // zero-width characters since the last letter, if there was one
}

func (f *folder) run(s string) {
	for i := 0; i < len(s); {
		r, n := rune(s[i]), 1
		if r >= utf8.RuneSelf {
			r, n = utf8.DecodeRuneInString(s[i:])
		}
		i += n
		f.rune(r)
	}
}

func (f *folder) rune(r rune) {
	if r < utf8.RuneSelf {
		f.ascii(r)
		return
	}
	switch {
	case r >= 0xe0000 && r <= 0xe007f: // tags
		f.tag(r)
		return
	case r >= 0xfe00 && r <= 0xfe0f:
		f.picked = append(f.picked, byte(r-0xfe00))
		return
	case r >= 0xe0100 && r <= 0xe01ef:
		f.picked = append(f.picked, byte(r-0xe0100+16))
		return
	case r == 0x202e || r == 0x202d:
		f.overrides++
		return
	case extract.Unseen(r):
		if extract.Letter(f.prev) && !f.space {
			f.joined++
		}
		return
	case r == 0xfffd:
		f.put(r)
		return
	case unicode.IsSpace(r) || r == 0x2800: // the blank of Braille
		f.white(r == 0x2028 || r == 0x2029)
		return
	}
	f.endSelectors()
	f.inFlag = r == 0x1f3f4
	if mark(r) {
		// Vietnamese and polytonic Greek have two on a letter, "zalgo" has many.
		if f.marks++; f.marks > 2 {
			f.stacked++
		}
		return
	}
	f.marks = 0
	if c, ok := f.table.flip[r]; ok {
		f.flipped++
		f.letter(c, false)
		return
	}
	if c, ok := f.table.alike[r]; ok {
		f.letter(c, true)
		return
	}
	if r >= 0x1f130 && r <= 0x1f189 || r >= 0x1f1e6 && r <= 0x1f1ff {
		f.styled++
		f.letter(squared(r), false)
		return
	}
	if hangul(r) || r >= 0x1f000 {
		if r < 0x1d400 || r > 0x1d7ff {
			f.put(unicode.ToLower(r))
			return
		}
	}
	d, ok := f.cache[r]
	if !ok {
		d = norm.NFKD.String(string(r))
		if len(d) > 16 {
			d = string(r) // one sign for a whole sentence: the attack is the time that a million of them takes
		}
		f.cache[r] = d
	}
	styled := len(d) == 1 && d[0] < utf8.RuneSelf
	for _, c := range d {
		if mark(c) {
			continue
		}
		c = unicode.ToLower(c)
		switch {
		case c < utf8.RuneSelf && extract.Letter(c):
			if styled {
				f.styled++
			}
			f.letter(c, false)
		case c < utf8.RuneSelf:
			f.ascii(c)
		default:
			if a, ok := f.table.alike[c]; ok {
				f.letter(a, true)
			} else if l, ok := f.table.spelled[c]; ok {
				if small(c) {
					f.styled++
				}
				for _, c := range l {
					f.letter(c, false)
				}
			} else {
				f.put(c)
			}
		}
	}
}

func (f *folder) ascii(r rune) {
	f.endSelectors()
	f.marks = 0
	switch {
	case r >= 'A' && r <= 'Z':
		f.letter(r+'a'-'A', false)
	case r >= 'a' && r <= 'z':
		f.letter(r, false)
	case r == ' ' || r == '\t' || r == '\n' || r == '\r' || r == '\f' || r == '\v':
		f.white(r == '\n')
	case r < ' ' || r == 0x7f: // shown by nobody
	default:
		f.put(r)
	}
}

// letter writes one Latin letter of a word.
func (f *folder) letter(r rune, alike bool) {
	if f.joined > 0 {
		f.unseen += f.joined
	}
	f.joined = 0
	if alike {
		f.alike = true
	} else {
		f.latin = true
	}
	f.write(r)
	f.lengthOfWord++
}

// put writes what is no Latin letter.
func (f *folder) put(r rune) {
	f.joined = 0
	if !extract.Letter(r) {
		f.endWord()
	}
	switch r {
	case '‘', '’', 'ʼ', '`', '´', '′':
		r = '\''
	case '‐', '‑', '‒', '–', '—', '−', '―':
		r = '-'
	case '“', '”', '„', '‟', '«', '»', '「', '」', '『', '』', '〝', '〞', '‹', '›', '‚':
		r = '"'
	}
	f.write(r)
}

func (f *folder) write(r rune) {
	if f.space {
		switch {
		case f.out.Len() == 0:
		case f.newline:
			f.out.WriteByte('\n')
		default:
			f.out.WriteByte(' ')
		}
		f.space, f.newline = false, false
	}
	f.out.WriteRune(r)
	f.prev = r
}

func (f *folder) white(line bool) {
	f.endWord()
	f.joined = 0
	f.space = true
	f.newline = f.newline || line
}

func (f *folder) endWord() {
	if f.latin && f.alike && f.lengthOfWord > 2 {
		f.mixed++
	}
	f.latin, f.alike, f.lengthOfWord = false, false, 0
}

func (f *folder) tag(r rune) {
	if f.inFlag { // the flags of England, Scotland and Wales are made of tags
		if f.flagged = append(f.flagged, r); r != 0xe007f && len(f.flagged) < 8 {
			return
		}
		if r == 0xe007f {
			f.inFlag, f.flagged = false, nil
			return
		}
		f.inFlag = false
		for _, r := range f.flagged {
			f.tag(r)
		}
		f.flagged = nil
		return
	}
	if c := r - 0xe0000; c >= ' ' && c < 0x7f {
		f.tagged.WriteRune(c)
	}
}

// maxSelectors bounds, in bytes, what is kept of variation selectors.
const maxSelectors = 64 << 10

// endSelectors keeps what a row of variation selectors spells. One or two of
// them choose the look of an emoji.
func (f *folder) endSelectors() {
	if len(f.picked) == 0 {
		return
	}
	if len(f.picked) >= 4 && len(f.selectors) < maxSelectors {
		f.selectors += strings.ToValidUTF8(string(f.picked), "") + " "
	}
	f.picked = f.picked[:0]
}

// mark are the combining marks that are dropped: those that sit on Latin,
// Greek, Cyrillic, Arabic and Hebrew letters. In other scripts they are vowels.
func mark(r rune) bool {
	switch {
	case r < 0x300:
		return false
	case r <= 0x36f, r >= 0x483 && r <= 0x489, r >= 0x591 && r <= 0x5c7, r >= 0x610 && r <= 0x61a, r >= 0x64b && r <= 0x65f, r == 0x670, r == 0x640,
		r == 0x93c, r >= 0x1ab0 && r <= 0x1aff, r >= 0x1dc0 && r <= 0x1dff, r >= 0x20d0 && r <= 0x20ff, r >= 0xfe20 && r <= 0xfe2f:
		return true
	}
	return false
}

// small says whether c is one of the small capitals of phonetic writing.
func small(c rune) bool {
	return c >= 0x1d00 && c <= 0x1d7f || c >= 0x250 && c <= 0x2af && c != 'ɡ' && c != 'ɑ' || c == 0xa730 || c == 0xa731
}

func hangul(r rune) bool { return r >= 0xac00 && r <= 0xd7a3 }

// squared returns the letter in a box or a flag.
func squared(r rune) rune {
	switch {
	case r >= 0x1f1e6 && r <= 0x1f1ff:
		return 'a' + r - 0x1f1e6
	case r <= 0x1f149:
		return 'a' + r - 0x1f130
	case r >= 0x1f150 && r <= 0x1f169:
		return 'a' + r - 0x1f150
	case r >= 0x1f170:
		return 'a' + (r-0x1f170)%26
	}
	return ' '
}

// letters are the tables of this file. They are built when the first mail is
// scanned: each part of a sandbox is this program and would otherwise build
// them as it starts.
var letters = sync.OnceValue(func() *letterTables {
	return &letterTables{spelledLetters(), alikeLetters(), flippedLetters()}
})

type letterTables struct {
	spelled     map[rune]string
	alike, flip map[rune]rune
}

// spelledLetters are letters that NFKD leaves whole.
func spelledLetters() map[rune]string {
	return map[rune]string{
		'ß': "ss", 'æ': "ae", 'œ': "oe", 'ø': "o", 'đ': "d", 'ð': "d", 'ł': "l", 'þ': "th", 'ı': "i", 'ħ': "h", 'ŧ': "t", 'ŋ': "n", 'ĸ': "k", 'ƀ': "b", 'ɓ': "b",
		'ƈ': "c", 'ɗ': "d", 'ƒ': "f", 'ɠ': "g", 'ƙ': "k", 'ɲ': "n", 'ƥ': "p", 'ƭ': "t", 'ƴ': "y", 'ƶ': "z", 'ɨ': "i", 'ʉ': "u", 'ɡ': "g", 'ɑ': "a", 'ɩ': "i",
		'ᴀ': "a", 'ʙ': "b", 'ᴄ': "c", 'ᴅ': "d", 'ᴇ': "e", 'ꜰ': "f", 'ɢ': "g", 'ʜ': "h", 'ɪ': "i", 'ᴊ': "j", 'ᴋ': "k", 'ʟ': "l", 'ᴍ': "m", 'ɴ': "n", 'ᴏ': "o",
		'ᴘ': "p", 'ǫ': "q", 'ꞯ': "q", 'ʀ': "r", 'ꜱ': "s", 'ᴛ': "t", 'ᴜ': "u", 'ᴠ': "v", 'ᴡ': "w", 'ʏ': "y", 'ᴢ': "z", 'ʠ': "q", 'ʂ': "s", 'ɭ': "l", 'ɫ': "l",
		// Arabic letters that are typed for each other.
		'ة': "ه", 'ى': "ي", 'ی': "ي", 'ک': "ك", 'ٱ': "ا",
	}
}

// alikeLetters are the letters of other scripts that look like Latin ones, lower case.
// The table is ours, after the idea of Unicode's TR39: only those pairs that a
// reader takes for each other in running text.
func alikeLetters() map[rune]rune {
	return build(map[string]string{
		// Cyrillic
		"а": "a", "в": "b", "с": "c", "ԁ": "d", "е": "e", "һ": "h", "і": "i", "ј": "j", "к": "k", "ӏ": "l", "м": "m", "н": "h", "о": "o", "р": "p", "ԛ": "q", "г": "r",
		"ѕ": "s", "т": "t", "у": "y", "ѵ": "v", "ԝ": "w", "х": "x", "ү": "y", "ғ": "f", "ҽ": "e", "п": "n", "ь": "b", "ѡ": "w", "ԍ": "g", "є": "e",
		// Greek
		"α": "a", "β": "b", "ϲ": "c", "ε": "e", "η": "n", "ι": "i", "κ": "k", "μ": "u", "ν": "v", "ο": "o", "ρ": "p", "σ": "o", "τ": "t", "υ": "u", "χ": "x", "γ": "y",
		"ω": "w", "ϳ": "j", "ζ": "z", "ϝ": "f",
		// Armenian
		"ա": "w", "ց": "g", "գ": "q", "զ": "q", "հ": "h", "յ": "j", "ո": "n", "ռ": "n", "ս": "u", "օ": "o", "ք": "p", "ժ": "d", "ւ": "l", "ն": "u",
		// Cherokee, whose capitals look Latin
		"Ꭰ": "d", "Ꭱ": "r", "Ꭲ": "t", "Ꭺ": "a", "Ꭻ": "j", "Ꭼ": "e", "Ꮃ": "w", "Ꮇ": "m", "Ꮋ": "h", "Ꮐ": "g", "Ꮓ": "z", "Ꮞ": "4", "Ꮢ": "r", "Ꮤ": "w", "Ꮥ": "s", "Ꮩ": "v", "Ꮪ": "s",
		"Ꮮ": "l", "Ꮯ": "c", "Ꮲ": "p", "Ꮶ": "k", "Ᏼ": "b", "Ꮖ": "i", "Ꮜ": "u", "Ᏻ": "g",
		// Lisu
		"ꓐ": "b", "ꓑ": "p", "ꓓ": "d", "ꓔ": "t", "ꓖ": "g", "ꓗ": "k", "ꓙ": "j", "ꓚ": "c", "ꓜ": "z", "ꓝ": "f", "ꓟ": "m", "ꓠ": "n", "ꓡ": "l", "ꓢ": "s", "ꓣ": "r", "ꓦ": "v", "ꓧ": "h",
		"ꓪ": "w", "ꓫ": "x", "ꓬ": "y", "ꓮ": "a", "ꓰ": "e", "ꓲ": "i", "ꓳ": "o", "ꓴ": "u",
		// Coptic
		"ⲁ": "a", "ⲃ": "b", "ⲥ": "c", "ⲉ": "e", "ⲓ": "i", "ⲕ": "k", "ⲟ": "o", "ⲣ": "p", "ⲧ": "t", "ⲩ": "y", "ⲭ": "x", "ⲛ": "n", "ⲙ": "m", "ⲏ": "h",
		// Georgian, Hebrew and others that stand in for single letters
		"ס": "o", "٥": "o", "ჿ": "y",
	})
}

// flippedLetters are letters turned over, of text that is also reversed.
func flippedLetters() map[rune]rune {
	return build(map[string]string{
		"ɐ": "a", "ǝ": "e", "ɟ": "f", "ƃ": "g", "ᵷ": "g", "ɥ": "h", "ᴉ": "i", "ɾ": "j", "ʞ": "k", "ꞁ": "l", "ɯ": "m", "ɹ": "r", "ʇ": "t", "ʌ": "v", "ʍ": "w", "ʎ": "y",
		"ɔ": "c",
	})
}

func build(m map[string]string) map[rune]rune {
	out := make(map[rune]rune, len(m)*2)
	for k, v := range m {
		r, _ := utf8.DecodeRuneInString(k)
		l, _ := utf8.DecodeRuneInString(v)
		out[r] = l
		if u := unicode.ToUpper(r); u != r {
			out[u] = l
		}
		if low := unicode.ToLower(r); low != r {
			out[low] = l
		}
	}
	return out
}

// leet are the digits and signs that stand for letters within words.
var leet = sync.OnceValue(func() *strings.Replacer {
	return strings.NewReplacer("0", "o", "1", "i", "3", "e", "4", "a", "5", "s", "7", "t", "8", "b", "@", "a", "$", "s", "!", "i", "|", "l", "+", "t", "(", "c", "€", "e", "9", "g", "6", "g")
})
