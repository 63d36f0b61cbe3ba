package leak

import (
	"fmt"
	"strings"
	"testing"
)

func TestAccountsAreCounted(t *testing.T) {
	m := Message{
		Text:  "Please pay to DE89 3704 0044 0532 0130 00, not to GB82 WEST 1234 5698 7654 32. Again: DE89370400440532013000. Wrong: DE89 3704 0044 0532 0130 01",
		Files: []File{{Name: "invoice.txt", Data: []byte("IBAN: DE89-3704-0044-0532-0130-00")}},
	}
	m.Raw = []byte("Subject: x\r\n\r\n" + m.Text)
	got := fmt.Sprint(Find(m).Accounts)
	if want := "[{DE89370400440532013000 3 text} {GB82WEST12345698765432 1 text}]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// FuzzAccounts: every account that is found has the length of its country and valid
// check digits, and one that stands alone in a line is found.
func FuzzAccounts(f *testing.F) {
	for _, s := range []string{"DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "DE89", "XX00 0000", "DE89 3704 0044 0532 0130 00x", "DE89  3704"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r := Find(Message{Text: text + "\nNL91 ABNA 0417 1643 00\n"})
		found := false
		for _, a := range r.Accounts {
			if len(a.Number) != ibanLength[a.Number[:2]] || mod97(a.Number) != 1 || a.Count < 1 {
				t.Fatalf("%+v is no account", a)
			}
			found = found || a.Number == "NL91ABNA0417164300"
		}
		if !found && len(r.Accounts) < maxAccounts {
			t.Fatalf("the planted account is missing in %v", r.Accounts)
		}
	})
}

// mod97 is the check of ISO 7064, digit by digit.
func mod97(number string) (n int) {
	for _, c := range number[4:] + number[:4] {
		if c >= 'A' && c <= 'Z' {
			n = (n*100 + int(c-'A') + 10) % 97
			continue
		}
		n = (n*10 + int(c-'0')) % 97
	}
	return n
}

func TestAccountsAreBounded(t *testing.T) {
	var b strings.Builder
	for i := range 300 { // Norwegian accounts, whose check digits are computed
		rest := fmt.Sprintf("%011d", 10000000000+i)
		n := 98 - mod97("NO00"+rest)
		fmt.Fprintf(&b, "NO%02d%s\n", n, rest)
	}
	if n := len(Find(Message{Text: b.String()}).Accounts); n != maxAccounts {
		t.Errorf("got %d accounts, want %d", n, maxAccounts)
	}
}
