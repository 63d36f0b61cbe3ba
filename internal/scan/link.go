package scan

import (
	"slices"
	"strings"
	"unicode/utf8"

	"postern/internal/extract"
)

// brands are names that phishing borrows, with the domains that are theirs.
var brands = []struct {
	name    string
	domains string // beginnings of registered domains
}{
	{"paypal", "paypal."},
	{"microsoft", "microsoft. live. office. outlook. sharepoint. microsoftonline."},
	{"office365", "office. microsoft."},
	{"apple", "apple. icloud."},
	{"icloud", "icloud. apple."},
	{"google", "google. gmail. youtube. goo."},
	{"gmail", "google. gmail."},
	{"amazon", "amazon. amazonses. amazonaws. aws."},
	{"netflix", "netflix."},
	{"docusign", "docusign."},
	{"dropbox", "dropbox. dropboxmail."},
	{"facebook", "facebook. facebookmail. fb. meta."},
	{"instagram", "instagram."},
	{"linkedin", "linkedin."},
	{"whatsapp", "whatsapp."},
	{"dhl", "dhl."},
	{"fedex", "fedex."},
	{"ups", "ups."},
	{"usps", "usps."},
	{"chase", "chase."},
	{"wellsfargo", "wellsfargo."},
	{"coinbase", "coinbase."},
	{"binance", "binance."},
	{"metamask", "metamask."},
	{"github", "github. githubusercontent."},
	{"adobe", "adobe."},
	{"sparkasse", "sparkasse."},
	{"postbank", "postbank."},
	{"ing-diba", "ing."},
	{"commerzbank", "commerzbank."},
	{"allegro", "allegro."},
	{"inpost", "inpost."},
	{"sberbank", "sberbank. sber."},
	{"gosuslugi", "gosuslugi."},
	{"privatbank", "privatbank."},
	{"rakuten", "rakuten."},
	{"alipay", "alipay."},
	{"wechat", "wechat. weixin."},
	{"bradesco", "bradesco."},
	{"itau", "itau."},
	{"bbva", "bbva."},
	{"santander", "santander."},
	{"laposte", "laposte."},
	{"ameli", "ameli."},
	{"impots", "impots."},
	{"posteitaliane", "poste."},
	{"intesasanpaolo", "intesasanpaolo."},
	{"rabobank", "rabobank."},
	{"postnl", "postnl."},
	{"digid", "digid."},
	{"steam", "steampowered. steamcommunity."},
	{"spotify", "spotify."},
	{"stripe", "stripe."},
	{"slack", "slack."},
	{"zoom", "zoom."},
	{"okta", "okta."},
	{"kakao", "kakao."},
	{"naver", "naver."},
	{"smbc", "smbc."},
	{"turkiye", "turkiye."},
}

// brandOf returns the brand whose name a host or a person's name bears.
func brandOf(name string) (brand, domains string) {
	name = strings.ToLower(name)
	words := strings.FieldsFunc(name, func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') })
	flat := strings.Join(words, "")
	for _, b := range brands {
		flatBrand := strings.ReplaceAll(b.name, "-", "")
		if len(flatBrand) >= 6 && strings.Contains(flat, flatBrand) {
			return b.name, b.domains
		}
		if slices.Contains(words, b.name) {
			return b.name, b.domains
		}
	}
	return "", ""
}

func owns(domains, host string) bool {
	reg := extract.RegisteredDomain(host)
	for d := range strings.FieldsSeq(domains) {
		if strings.HasPrefix(reg, d) {
			return true
		}
	}
	return false
}

// lookalike returns the brand that a host imitates: by letters of other
// scripts, by digits, by letters that are doubled, left out or swapped.
func lookalike(host string) string {
	shown := host
	foreign := false
	if strings.Contains(host, "xn--") {
		shown = unpuny(host)
		foreign = true
	}
	f := fold(shown)
	if f.mixed > 0 || f.text != shown {
		foreign = true
	}
	reg := extract.RegisteredDomain(f.text)
	label, _, _ := strings.Cut(reg, ".")
	candidates := []string{label}
	if l := leet().Replace(label); l != label {
		candidates = append(candidates, l)
	}
	candidates = append(candidates, strings.ReplaceAll(label, "1", "l"), strings.ReplaceAll(label, "rn", "m"), strings.ReplaceAll(label, "vv", "w"))
	for _, b := range brands {
		name := strings.ReplaceAll(b.name, "-", "")
		if len(name) < 5 {
			continue
		}
		for i, c := range candidates {
			if c == name && (i > 0 && c != label || foreign) && !owns(b.domains, host) {
				return b.name
			}
		}
		if label != name && !owns(b.domains, host) && len(label) >= 6 && oneEdit(label, name) {
			return b.name
		}
	}
	if foreign && strings.Contains(host, "xn--") && f.mixed > 0 {
		return shown
	}
	return ""
}

// oneEdit says whether a becomes b by one letter more, less, other, or by two
// that are swapped.
func oneEdit(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	if len(b)-len(a) > 1 {
		return false
	}
	i := 0
	for i < len(a) && a[i] == b[i] {
		i++
	}
	if len(a) < len(b) {
		return a[i:] == b[i+1:]
	}
	if i == len(a) {
		return false // the same
	}
	if a[i+1:] == b[i+1:] {
		return true
	}
	return i+1 < len(a) && a[i] == b[i+1] && a[i+1] == b[i] && a[i+2:] == b[i+2:]
}

// unpuny decodes the labels of a host that are in punycode, RFC 3492.
func unpuny(host string) string {
	labels := strings.Split(host, ".")
	for i, l := range labels {
		if p, ok := strings.CutPrefix(l, "xn--"); ok && len(p) < 64 {
			if u, ok := punycode(p); ok {
				labels[i] = u
			}
		}
	}
	return strings.Join(labels, ".")
}

func punycode(s string) (string, bool) {
	var out []rune
	if i := strings.LastIndexByte(s, '-'); i > 0 {
		out = []rune(s[:i])
		s = s[i+1:]
	}
	n, at, bias := rune(128), int32(0), int32(72)
	for len(s) > 0 {
		old, w := at, int32(1)
		for k := int32(36); ; k += 36 {
			if s == "" {
				return "", false
			}
			var d int32
			switch c := s[0]; {
			case c >= 'a' && c <= 'z':
				d = int32(c - 'a')
			case c >= '0' && c <= '9':
				d = int32(c-'0') + 26
			default:
				return "", false
			}
			s = s[1:]
			if d > (1<<31-1-at)/w {
				return "", false
			}
			at += d * w
			t := min(max(k-bias, 1), 26)
			if d < t {
				break
			}
			if w > (1<<31-1)/(36-t) {
				return "", false
			}
			w *= 36 - t
		}
		size := int32(len(out) + 1)
		delta := (at - old) / 2
		if old == 0 {
			delta = (at - old) / 700
		}
		delta += delta / size
		k := int32(0)
		for delta > 455 {
			delta /= 35
			k += 36
		}
		bias = k + 36*delta/(delta+38)
		n += at / size
		at %= size
		if !utf8.ValidRune(n) {
			return "", false
		}
		out = append(out[:at], append([]rune{n}, out[at:]...)...)
		at++
	}
	return string(out), true
}

// urlsIn returns the links of a plain text, and the places in a folded text
// where an address or a link stands.
func urlsIn(text string) (links []extract.Link) {
	low := strings.ToLower(text)
	if len(low) != len(text) {
		text = low
	}
	for i := 0; i < len(low) && len(links) < extract.MaxLinks; {
		j := strings.Index(low[i:], "http")
		if j < 0 {
			return links
		}
		j += i
		rest := low[j:]
		if !strings.HasPrefix(rest, "http://") && !strings.HasPrefix(rest, "https://") {
			i = j + 4
			continue
		}
		end := strings.IndexAny(rest, " \t\r\n<>\"'`")
		if end < 0 {
			end = len(rest)
		}
		end = min(end, 4000)
		links = append(links, extract.Link{Href: strings.TrimRight(text[j:j+end], ".,;:!?)]}"), Plain: true})
		i = j + max(end, 1)
	}
	return links
}

// destinations returns where in a folded text addresses and links stand.
func destinations(text string) []hit {
	var hits []hit
	for i := range len(text) {
		if len(hits) >= extract.MaxLinks {
			return hits
		}
		switch text[i] {
		case '@':
			a, b := i, i+1
			for a > 0 && i-a < 64 && addressByte(text[a-1]) {
				a--
			}
			dot := false
			for b < len(text) && b-i < 255 && addressByte(text[b]) {
				dot = dot || text[b] == '.'
				b++
			}
			if a < i && dot && b > i+3 {
				hits = append(hits, hit{a, b, dest})
			}
		case ':':
			if strings.HasPrefix(text[i:], "://") && (strings.HasSuffix(text[:i], "http") || strings.HasSuffix(text[:i], "https") || strings.HasSuffix(text[:i], "ftp")) {
				hits = append(hits, hit{max(0, i-4), min(len(text), i+4), dest})
			}
		}
	}
	return hits
}

// addressByte says whether c may stand in a mail address, in lower case.
func addressByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_' || c == '+' || c == '%' || c == '='
}
