package mail

import (
	"encoding/base64"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/net/html/charset"
	"golang.org/x/text/encoding"
	"golang.org/x/text/encoding/charmap"
	"golang.org/x/text/encoding/simplifiedchinese"
)

// A decoder returns octets of one charset in UTF-8. What is not in the charset
// becomes U+FFFD.
type decoder func(octets []byte) string

// charsetDecoder returns the decoder of a charset, by any name that mail programs
// write for it, or nil. Rare says that some mail programs do not know the charset
// and show something else.
func charsetDecoder(label string) (decode decoder, rare bool) {
	written := strings.ToLower(strings.TrimSpace(label))
	label, _, _ = strings.Cut(written, ";")
	label = strings.Trim(label, " \t\"'")
	rare = label != written
	short := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, label)
	if label == "" {
		return fromUTF8, rare
	}
	switch short {
	case "":
		return nil, true
	case "utf8", "usascii", "ascii", "ansix341968":
		return fromUTF8, rare || !slices.Contains([]string{"utf-8", "utf8", "us-ascii", "ascii", "ansi_x3.4-1968"}, label)
	case "cspc850multilingual":
		return fromEncoding(charmap.CodePage850), true
	case "cspc8codepage437":
		return fromEncoding(charmap.CodePage437), true
	case "utf8mb4", "utf8sig", "cp65001":
		return fromUTF8, true
	case "utf7", "unicode11utf7", "csunicode11utf7", "unicode20utf7", "xunicode20utf7":
		return fromUTF7, true
	case "utf16", "utf16le", "utf16be", "unicode", "ucs2", "iso10646ucs2":
		return func(octets []byte) string { return fromUTF16(octets, short == "utf16be") }, true
	case "utf32", "utf32le", "utf32be", "ucs4":
		return func(octets []byte) string { return fromUTF32(octets, short == "utf32be") }, true
	case "hzgb2312", "hz":
		return fromEncoding(simplifiedchinese.HZGB2312), true
	case "iso2022kr", "csiso2022kr":
		return fromISO2022KR, true
	}
	if e, name := charset.Lookup(label); e != nil && name != "replacement" {
		return fromEncoding(e), rare
	}
	if d := codePage(short); d != nil {
		return d, true
	}
	for _, alias := range []struct{ begin, name string }{
		{"koi8ru", "koi8-u"}, {"iso2022jp", "iso-2022-jp"}, {"gb2312", "gbk"}, {"eucgb2312", "gbk"}, {"xgb2312", "gbk"}, {"ksc5601", "euc-kr"}, {"shiftjis", "shift_jis"}, {"big5", "big5"},
	} {
		if strings.HasPrefix(short, alias.begin) {
			e, _ := charset.Lookup(alias.name)
			return fromEncoding(e), true
		}
	}
	return nil, true
}

// codePages are the code pages of IBM, DOS and Windows that are not known to web
// browsers by these numbers.
func codePages(number int) encoding.Encoding {
	switch number {
	case 37:
		return charmap.CodePage037
	case 437:
		return charmap.CodePage437
	case 850:
		return charmap.CodePage850
	case 852:
		return charmap.CodePage852
	case 855:
		return charmap.CodePage855
	case 858:
		return charmap.CodePage858
	case 860:
		return charmap.CodePage860
	case 862:
		return charmap.CodePage862
	case 863:
		return charmap.CodePage863
	case 865:
		return charmap.CodePage865
	case 866:
		return charmap.CodePage866
	case 1047:
		return charmap.CodePage1047
	case 1140:
		return charmap.CodePage1140
	}
	names := map[int]string{
		874: "windows-874", 932: "shift_jis", 936: "gbk", 949: "euc-kr", 950: "big5", 10000: "macintosh", 20866: "koi8-r", 21866: "koi8-u",
		51932: "euc-jp", 51949: "euc-kr", 54936: "gb18030",
	}
	name := names[number]
	switch {
	case number >= 1250 && number <= 1258:
		name = "windows-" + strconv.Itoa(number)
	case number >= 28591 && number <= 28606:
		name = "iso-8859-" + strconv.Itoa(number-28590)
	}
	e, _ := charset.Lookup(name)
	return e
}

// codePage returns the decoder of a charset whose name, of letters and digits
// alone, ends in the number of a code page or of a part of ISO 8859: cp850,
// xwindows1251, 88591.
func codePage(short string) decoder {
	word := strings.TrimRight(short, "0123456789")
	number, err := strconv.Atoi(short[len(word):])
	if err != nil || number > 1e6 {
		return nil
	}
	word = strings.TrimPrefix(word, "x")
	if slices.Contains([]string{"", "iso"}, word) && strings.HasPrefix(short[len(short)-len(strconv.Itoa(number)):], "8859") {
		if e, _ := charset.Lookup("iso-8859-" + strconv.Itoa(number)[len("8859"):]); e != nil {
			return fromEncoding(e)
		}
		return nil
	}
	if !slices.Contains([]string{"", "cp", "ibm", "dos", "oem", "ms", "win", "windows", "mswin", "cspc", "csibm", "cswindows", "codepage"}, word) {
		return nil
	}
	if table := dosTables[number]; table != "" {
		return func(octets []byte) string { return fromTable([]rune(table), octets) }
	}
	if e := codePages(number); e != nil {
		return fromEncoding(e)
	}
	return nil
}

// dosTables are code pages that golang.org/x/text has not: the characters of the
// octets 0x80 to 0xff.
var dosTables = map[int]string{
	720:  "\u0080\u0081éâ\u0084à\u0086çêëèïî\u008d\u008e\u008f\u0090\u0651\u0652ô¤\u0640ûù\u0621\u0622\u0623\u0624£\u0625\u0626\u0627\u0628\u0629\u062a\u062b\u062c\u062d\u062e\u062f\u0630\u0631\u0632\u0633\u0634\u0635«»\u2591\u2592\u2593\u2502\u2524\u2561\u2562\u2556\u2555\u2563\u2551\u2557\u255d\u255c\u255b\u2510\u2514\u2534\u252c\u251c\u2500\u253c\u255e\u255f\u255a\u2554\u2569\u2566\u2560\u2550\u256c\u2567\u2568\u2564\u2565\u2559\u2558\u2552\u2553\u256b\u256a\u2518\u250c\u2588\u2584\u258c\u2590\u2580\u0636\u0637\u0638\u0639\u063a\u0641µ\u0642\u0643\u0644\u0645\u0646\u0647\u0648\u0649\u064a≡\u064b\u064c\u064d\u064e\u064f\u0650≈°∙·√ⁿ²\u25a0\u00a0",
	737:  "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩαβγδεζηθικλμνξοπρσςτυφχψ░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀ωάέήϊίόύϋώΆΈΉΊΌΎΏ±≥≤ΪΫ÷≈°∙·√ⁿ²■\u00a0",
	775:  "ĆüéāäģåćłēŖŗīŹÄÅÉæÆōöĢ¢ŚśÖÜø£Ø×¤ĀĪóŻżź”¦©®¬½¼Ł«»░▒▓│┤ĄČĘĖ╣║╗╝ĮŠ┐└┴┬├─┼ŲŪ╚╔╩╦╠═╬Žąčęėįšųūž┘┌█▄▌▐▀ÓßŌŃõÕµńĶķĻļņĒŅ’\u00ad±“¾¶§÷„°∙·¹³²■\u00a0",
	857:  "ÇüéâäàåçêëèïîıÄÅÉæÆôöòûùİÖÜø£ØŞşáíóúñÑĞğ¿®¬½¼¡«»░▒▓│┤ÁÂÀ©╣║╗╝¢¥┐└┴┬├─┼ãÃ╚╔╩╦╠═╬¤ºªÊËÈ\ufffdÍÎÏ┘┌█▄¦Ì▀ÓßÔÒõÕµ\ufffd×ÚÛÙìÿ¯´\u00ad±\ufffd¾¶§÷¸°¨·¹³²■\u00a0",
	861:  "ÇüéâäàåçêëèÐðÞÄÅÉæÆôöþûÝýÖÜø£Ø₧ƒáíóúÁÍÓÚ¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u00a0",
	869:  "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffdΆ\ufffd·¬¦‘’Έ―ΉΊΪΌ\ufffd\ufffdΎΫ©Ώ²³ά£έήίϊΐόύΑΒΓΔΕΖΗ½ΘΙ«»░▒▓│┤ΚΛΜΝ╣║╗╝ΞΟ┐└┴┬├─┼ΠΡ╚╔╩╦╠═╬ΣΤΥΦΧΨΩαβγ┘┌█▄δε▀ζηθικλμνξοπρσςτ΄\u00ad±υφχ§ψ΅°¨ωϋΰώ■\u00a0",
	1125: "АБВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯабвгдежзийклмноп░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀рстуфхцчшщъыьэюяЁёҐґЄєІіЇї·√№¤■\u00a0",
}

func fromTable(table []rune, octets []byte) string {
	var b strings.Builder
	for _, c := range octets {
		if c < 0x80 {
			b.WriteByte(c)
		} else {
			b.WriteRune(table[c-0x80])
		}
	}
	return b.String()
}

func fromUTF8(octets []byte) string { return strings.ToValidUTF8(string(octets), "\ufffd") }

func fromEncoding(e encoding.Encoding) decoder {
	return func(octets []byte) string {
		out, err := e.NewDecoder().Bytes(octets)
		if err != nil {
			return fromUTF8(octets)
		}
		return fromUTF8(out)
	}
}

// fromUTF16 reads RFC 2781. A byte order mark decides; without one most programs
// take the order of Windows.
func fromUTF16(octets []byte, big bool) string {
	switch {
	case len(octets) >= 2 && octets[0] == 0xfe && octets[1] == 0xff:
		octets, big = octets[2:], true
	case len(octets) >= 2 && octets[0] == 0xff && octets[1] == 0xfe:
		octets, big = octets[2:], false
	}
	return wide(octets, big)
}

func wide(octets []byte, big bool) string {
	units := make([]uint16, 0, len(octets)/2+1)
	for ; len(octets) >= 2; octets = octets[2:] {
		if big {
			units = append(units, binary.BigEndian.Uint16(octets))
		} else {
			units = append(units, binary.LittleEndian.Uint16(octets))
		}
	}
	if len(octets) > 0 {
		units = append(units, utf8.RuneError)
	}
	return string(utf16.Decode(units))
}

func fromUTF32(octets []byte, big bool) string {
	order := binary.ByteOrder(binary.LittleEndian)
	if big || len(octets) >= 4 && binary.BigEndian.Uint32(octets) == 0xfeff {
		order = binary.BigEndian
	}
	var b strings.Builder
	for first := true; len(octets) >= 4; first, octets = false, octets[4:] {
		r := order.Uint32(octets)
		switch {
		case first && r == 0xfeff: // the byte order mark
		case r > 0x10ffff:
			b.WriteRune(utf8.RuneError)
		default:
			b.WriteRune(rune(r)) // a surrogate is written as U+FFFD
		}
	}
	if len(octets) > 0 {
		b.WriteRune(utf8.RuneError)
	}
	return b.String()
}

// fromUTF7 reads RFC 2152. A plus sign without base64 after it stays, and octets
// that are not ASCII become U+FFFD.
func fromUTF7(octets []byte) string {
	var b strings.Builder
	for i := 0; i < len(octets); {
		c := octets[i]
		if i++; c >= utf8.RuneSelf {
			b.WriteRune(utf8.RuneError)
			continue
		} else if c != '+' {
			b.WriteByte(c)
			continue
		}
		end := i
		for end < len(octets) && (octets[end] == '+' || octets[end] == '/' || octets[end] >= '0' && octets[end] <= '9' || octets[end]|0x20 >= 'a' && octets[end]|0x20 <= 'z') {
			end++
		}
		encoded := octets[i:end]
		if len(encoded) == 0 {
			b.WriteByte('+')
		} else {
			if len(encoded)%4 == 1 { // a lone character carries no whole octet
				encoded = encoded[:len(encoded)-1]
			}
			units, _ := base64.RawStdEncoding.AppendDecode(nil, encoded)
			b.WriteString(wide(units[:len(units)&^1], true)) // a rest of up to 15 bits is padding
		}
		if i = end; i < len(octets) && octets[i] == '-' {
			i++
		}
	}
	return b.String()
}

// fromISO2022KR reads RFC 1557: between SO and SI, pairs of octets are letters of KS
// C 5601, as EUC-KR has them with the eighth bit set.
func fromISO2022KR(octets []byte) string {
	e, _ := charset.Lookup("euc-kr")
	octets = []byte(strings.ReplaceAll(string(octets), "\x1b$)C", ""))
	out := make([]byte, 0, len(octets))
	korean := false
	for _, c := range octets {
		switch {
		case c == 0x0e || c == 0x0f:
			korean = c == 0x0e
			continue
		case c == '\n':
			korean = false
		case korean && c > ' ' && c < 0x7f:
			c |= 0x80
		}
		out = append(out, c)
	}
	return fromEncoding(e)(out)
}

// readCharset returns octets in UTF-8, as well as they can be read, and says in
// words what mail programs read differently, or nothing. A charset that is unknown
// is read as UTF-8 where that fits, and otherwise as Windows-1252.
func readCharset(label string, octets []byte) (text, odd string) {
	decode, rare := charsetDecoder(label)
	switch {
	case decode == nil:
		odd = "a charset is unknown: " + quote(label)
		if utf8.Valid(octets) {
			return string(octets), odd
		}
		return fromEncoding(charmap.Windows1252)(octets), odd
	case rare:
		odd = "not all mail programs know the charset " + quote(label) + ", and some show something else"
	}
	text = decode(octets)
	if strings.Contains(text, "\ufffd") && !strings.Contains(string(octets), "\ufffd") {
		odd = "a text is not in the charset that it names"
	}
	return text, odd
}
