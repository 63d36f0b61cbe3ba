package leak

import (
	"math/big"
	"slices"
	"strings"
)

// numbers finds payment cards, bank accounts and identity numbers.
func numbers(text string, found func(match)) {
	for i := 0; i < len(text); {
		c := text[i]
		if !digit(c) && (c < 'A' || c > 'Z') || i > 0 && (wordByte(text[i-1]) || text[i-1] == '.' && i > 1 && digit(text[i-2])) {
			i++
			continue
		}
		if n := iban(text[i:]); n > 0 {
			found(match{i, i + n, FlagIBAN, "iban", text[i : i+2]})
			i += n
			continue
		}
		if n := card(text[i:]); n > 0 {
			found(match{i, i + n, FlagCard, "payment_card", ""})
			i += n
			continue
		}
		if n, rule := identity(text[i:], text[max(0, i-40):i]); n > 0 {
			found(match{i, i + n, FlagNationalID, rule, ""})
			i += n
			continue
		}
		for i < len(text) && wordByte(text[i]) {
			i++
		}
	}
}

func digit(c byte) bool { return c >= '0' && c <= '9' }

func wordByte(c byte) bool {
	return digit(c) || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= 0x80
}

// group returns the digits at the beginning of s, which single spaces or dashes
// may separate, and their length with the separators.
func group(s string, most int) (digits string, n int) {
	var b strings.Builder
	for i := 0; i < len(s) && b.Len() <= most; i++ {
		switch {
		case digit(s[i]):
			b.WriteByte(s[i])
			n = i + 1
		case (s[i] == ' ' || s[i] == '-') && i > 0 && digit(s[i-1]) && i+1 < len(s) && digit(s[i+1]):
		default:
			return b.String(), n
		}
	}
	return b.String(), n
}

// luhn checks the check digit of ISO/IEC 7812.
func luhn(digits string) bool {
	sum := 0
	for i := range len(digits) {
		d := int(digits[len(digits)-1-i] - '0')
		if i%2 == 1 {
			if d *= 2; d > 9 {
				d -= 9
			}
		}
		sum += d
	}
	return sum%10 == 0
}

// testCards are the test numbers that payment services publish.
var testCards = []string{
	"4111111111111111", "4242424242424242", "4000056655665556", "5555555555554444", "5105105105105100", "2223003122003222", "378282246310005", "371449635398431",
	"6011111111111117", "6011000990139424", "3530111333300000", "30569309025904", "38520000023237", "4012888888881881", "4222222222222",
}

// card returns the length of a payment card's number at the beginning of s.
func card(s string) int {
	d, n := group(s, 19)
	if n < len(s) && wordByte(s[n]) || len(d) < 13 || len(d) > 19 {
		return 0
	}
	head := func(k int) (v int) {
		for i := range k {
			v = v*10 + int(d[i]-'0')
		}
		return v
	}
	h2, h4 := head(2), head(4)
	known := false
	switch {
	case d[0] == '4':
		known = len(d) == 13 || len(d) == 16 || len(d) == 19
	case h2 >= 51 && h2 <= 55, h4 >= 2221 && h4 <= 2720:
		known = len(d) == 16
	case h2 == 34, h2 == 37:
		known = len(d) == 15
	case h4 == 6011, h2 == 65, h2 == 62, h2 == 35:
		known = len(d) >= 16
	case h2 == 36, h2 == 38, h2 == 30:
		known = len(d) == 14
	}
	if !known || !luhn(d) || strings.Count(d, d[:1]) == len(d) {
		return 0
	}
	if slices.Contains(testCards, d) {
		return 0
	}
	return n
}

// ibanLength are the lengths of each country's account numbers (ISO 13616).
var ibanLength = map[string]int{
	"AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BR": 29, "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24,
	"DE": 22, "DK": 18, "DO": 28, "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28,
	"HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20,
	"LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30, "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29, "PT": 25,
	"QA": 29, "RO": 24, "RS": 22, "SA": 24, "SC": 31, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29,
	"VA": 22, "VG": 24, "XK": 20,
}

// iban returns the length of an account number at the beginning of s.
func iban(s string) int {
	if len(s) < 15 || s[0] < 'A' || s[0] > 'Z' || s[1] < 'A' || s[1] > 'Z' || !digit(s[2]) || !digit(s[3]) {
		return 0
	}
	length := ibanLength[s[:2]]
	if length == 0 {
		return 0
	}
	var b strings.Builder
	n := 0
	for i := 0; i < len(s) && b.Len() < length; i++ {
		switch c := s[i]; {
		case digit(c), c >= 'A' && c <= 'Z':
			b.WriteByte(c)
			n = i + 1
		case (c == ' ' || c == '-') && i >= 4 && s[i-1] != ' ':
		default:
			return 0
		}
	}
	v := b.String()
	if len(v) != length || n < len(s) && wordByte(s[n]) {
		return 0
	}
	var num strings.Builder
	for _, c := range []byte(v[4:] + v[:4]) {
		if digit(c) {
			num.WriteByte(c)
			continue
		}
		c -= 'A' - 10
		num.WriteByte('0' + c/10)
		num.WriteByte('0' + c%10)
	}
	x, _ := new(big.Int).SetString(num.String(), 10)
	if new(big.Int).Mod(x, big.NewInt(97)).Int64() != 1 {
		return 0
	}
	return n
}

// people counts the different addresses and telephone numbers of a text.
type people struct{ addresses, phones map[string]bool }

// maxPeople is how many are counted.
const maxPeople = 2000

func (p *people) count(text string) {
	text = lowerASCII(text)
	for i := 0; len(p.addresses) < maxPeople; {
		j := strings.IndexByte(text[i:], '@')
		if j < 0 {
			break
		}
		j += i
		from, to := j, j+1
		for from > 0 && j-from < 64 && addressByte(text[from-1]) {
			from--
		}
		for to < len(text) && to-j < 255 && addressByte(text[to]) {
			to++
		}
		i = j + 1
		if host := strings.TrimRight(text[j+1:to], ".-"); from < j && strings.Contains(host, ".") {
			p.addresses[text[from:j]+"@"+host] = true
			i = to
		}
	}
	for i := 0; i < len(text) && len(p.phones) < maxPeople; i++ {
		if text[i] != '+' && text[i] != '0' && text[i] != '(' || i > 0 && (wordByte(text[i-1]) || strings.IndexByte("+-./:", text[i-1]) >= 0) {
			continue
		}
		var b strings.Builder
		j := i
		for ; j < len(text) && b.Len() < 17; j++ {
			if digit(text[j]) {
				b.WriteByte(text[j])
			} else if strings.IndexByte("+ ()-/.", text[j]) < 0 || text[j] == '+' && j > i {
				break
			}
		}
		if b.Len() >= 8 && b.Len() <= 15 && (j == len(text) || !wordByte(text[j])) && strings.Trim(b.String(), b.String()[:1]) != "" {
			p.phones[b.String()] = true
			i = j
		}
	}
}

// lowerASCII is strings.ToLower for ASCII alone. Offsets stay valid, also in
// text that is not UTF-8.
func lowerASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// addressByte says whether c may stand in a mail address, in lower case.
func addressByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_' || c == '+' || c == '%' || c == '='
}
