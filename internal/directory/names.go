package directory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/text/unicode/norm"

	"postern/internal/auth"
	"postern/internal/store"
)

// A TakenError tells which address is in use, and which like it are free. It is
// an [ErrTaken].
type TakenError struct {
	Address     string
	Suggestions []string // whole addresses, free a moment ago
}

// Error implements error.
func (e *TakenError) Error() string { return e.Address + ": " + ErrTaken.Error() }

// Unwrap returns [ErrTaken].
func (e *TakenError) Unwrap() error { return ErrTaken }

// localPart is compiled when it is first needed: each part of a sandbox is this
// program, and would otherwise compile it as it starts.
var localPart = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`) })

// guarded names cannot be created by programs in any domain. They belong to the
// domain's operator (RFC 2142), or prove control of it: certificate authorities
// trust whoever reads the mail of some of them. An owner may create them by hand.
var guarded = strings.Fields(`
	abuse noc security postmaster hostmaster usenet news webmaster www uucp ftp
	admin administrator root is it mis ssladmin ssladministrator sslwebmaster sysadmin domainadmin dnsadmin certificates
	autoconfig autodiscover mta-sts dmarc dmarc-reports dkim spf tls-rpt tlsrpt smtp imap pop3 dns whois registrar arc
	listserv majordomo mailman list-request
`)

// machines are names that mail servers use for themselves, and placeholders that
// programs write instead of a name. Nobody can have them.
var machines = strings.Fields(`
	mailer-daemon mailerdaemon daemon nobody bounce bounces bounced return returns
	localhost localdomain null undefined none nil
`)

// roles cannot be created by programs in the domain of this server, where they
// would let an agent pass for the service, its staff, or the sender of its
// notices. In a project's own domain support@ may well be an agent. In this
// server's domain an owner has to create it.
var roles = strings.Fields(`
	info marketing sales support
	noreply no-reply donotreply do-not-reply notification notifications alert alerts list lists owner-list
	subscribe unsubscribe opt-out optout fbl complaints spam ham phishing virus quarantine
	help helpdesk contact contacts team staff office official service services system operator operators moderator moderators
	owner owners everyone everybody all users members people person human humans
	billing payment payments invoice invoices accounting accounts finance legal privacy gdpr dpo compliance copyright dmca
	press media jobs careers hr ceo cto cfo ciso president security-team incident incidents cert csirt soc trust safety
	account login signin signup register password reset verify verification confirm authentication auth oauth sso token key keys
	api dev test true false example invalid mail email e-mail inbox mailbox
	postern oversight gate gateway approval approvals audit server host status update updates upgrade
	lobster lobstermail multimail
`)

// operated are the guarded names that a domain must have, so that others can reach
// its operator (RFC 5321 4.5.1, RFC 2142).
var operated = []string{"postmaster", "abuse"}

// Operated returns which addresses in the domain called name a person should
// make, so that the domain can be reached about its mail.
func Operated(name string) (out []string) {
	for _, local := range operated {
		out = append(out, local+"@"+name)
	}
	return out
}

// IsOperated reports whether an address belongs to its domain's operator. The
// attack: an agent that reads it receives a proof of control of the domain, and
// gets a certificate for it.
func IsOperated(address string) bool {
	local, _, _ := strings.Cut(address, "@")
	return slices.Contains(guarded, local)
}

// folded returns a name without what is easily overlooked in one. The attack:
// post-master next to the real one.
func folded(name string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune("._-", r) {
			return -1
		}
		return r
	}, name)
}

// reserved holds the folded names that are reserved, and whether everywhere.
var reserved = sync.OnceValue(func() map[string]bool {
	m := map[string]bool{}
	for _, name := range roles {
		m[folded(name)] = false
	}
	for _, name := range append(slices.Clone(guarded), machines...) {
		m[folded(name)] = true
	}
	return m
})

// isReserved reports whether a name is reserved in a domain, which is ours or
// some project's. A guarded name is so with a number behind it too: postmaster1.
func isReserved(name string, ours bool) bool {
	name = folded(name)
	everywhere, ok := reserved()[name]
	return ok && (ours || everywhere) || reserved()[strings.TrimRight(name, "0123456789")]
}

// mayName returns an error if who cannot create an address with this name before
// the @, in a domain which is ours or some project's. An owner may have reserved
// names exactly as written; nobody may have names that only look like them.
func mayName(who auth.Principal, name string, ours bool) error {
	err := CheckName(name, ours)
	if errors.Is(err, ErrReserved) && who.Manages() && (slices.Contains(guarded, name) || slices.Contains(roles, name)) {
		return nil
	}
	return err
}

// CheckName returns why a name cannot be the part of an address before the @,
// in a domain which is ours or some project's, for anybody but an owner.
func CheckName(name string, ours bool) error {
	if len(name) < 3 || len(name) > 64 || !localPart().MatchString(name) || strings.Contains(name, "..") {
		return fmt.Errorf("%w: address: the name must be 3 to 64 characters of a-z 0-9 . _ -, and begin and end with a letter or digit", ErrInvalid)
	}
	switch {
	case !isReserved(name, ours):
		return nil
	case slices.Contains(machines, name):
		return fmt.Errorf("%w: address: %s is %w for mail servers: choose another name", ErrInvalid, name, ErrReserved)
	case slices.Contains(guarded, name) || slices.Contains(roles, name):
		return fmt.Errorf("%w: address: %s is %w for the operator of the domain: an owner can create it, in the console under Inboxes or at the machine with postern inbox create %s; a key cannot",
			ErrInvalid, name, ErrReserved, name)
	}
	return fmt.Errorf("%w: address: %s is %w, since it looks like a name of the domain's operator: choose another", ErrInvalid, name, ErrReserved)
}

// spelled are letters that do not come apart into one of a-z and a mark.
var spelled = strings.NewReplacer("ß", "ss", "æ", "ae", "œ", "oe", "ø", "o", "đ", "d", "ð", "d", "ł", "l", "þ", "th", "ı", "i", "ä", "ae", "ö", "oe", "ü", "ue", "&", " and ")

// NameFor returns a name for an address out of free text, "Zoë's Sales Bot":
// "zoes-sales-bot". It is empty if there is nothing in it to make one of.
func NameFor(text string) string {
	text = spelled.Replace(strings.ToLower(norm.NFC.String(text)))
	var b strings.Builder
	for _, r := range norm.NFKD.String(text) {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			b.WriteRune(r)
		case unicode.Is(unicode.Mn, r), r == '\'', r == '’': // belongs to the letter before it
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
		if b.Len() >= 40 {
			break
		}
	}
	name := strings.Trim(b.String(), "-")
	switch {
	case name == "":
		return ""
	case len(name) < 3 || isReserved(name, true):
		name += "-agent"
	}
	if CheckName(name, true) != nil {
		return ""
	}
	return name
}

// Words that make a name which can be read out and remembered.
var (
	manners = strings.Fields(`able amber apt brave brief bright brisk calm candid clear clever cool coral crisp deft early eager even fair fast fine fond
		frank fresh gentle glad golden good grand green happy honest humble keen kind lively loyal lucid mellow merry mild modest neat noble patient plain
		polite prime prompt proud pure quick quiet rapid ready rosy royal sage silver sincere smart smooth solid steady sunny swift tidy true vivid warm wise witty`)
	beings = strings.Fields(`alder aspen badger beaver birch bison cedar clover condor coral crane cypress dolphin dove eagle elm falcon fern finch fox gannet
		gecko hare hawk hazel heron holly ibis iris ivy jay juniper kestrel koala lark laurel lemur linden lotus lynx magpie maple marten mink moose myrtle
		newt oak olive orca oriole osprey otter owl panda pearl pine plover puffin quail raven robin rowan salmon seal sparrow spruce stork swan tern thrush tiger walnut willow wren`)
)

// drawnName returns a name that nobody has asked for.
func drawnName() string {
	return manners[below(len(manners))] + "-" + beings[below(len(beings))] + "-" + strconv.Itoa(100+below(900))
}

func below(n int) int {
	i, err := rand.Int(rand.Reader, big.NewInt(int64(n)))
	if err != nil { // unreachable: the reader never fails
		return 0
	}
	return int(i.Int64())
}

// like returns names like name, from the likeliest.
func like(name string) []string {
	name = name[:min(len(name), 54)]
	name = strings.TrimRight(name, "._-")
	out := []string{name + "-agent", name + "-mail", name + "-2", name + "-3"}
	for range 4 {
		out = append(out, name+"-"+strconv.Itoa(100+below(900)))
	}
	return slices.DeleteFunc(out, func(s string) bool { return CheckName(s, true) != nil })
}

// taken reports whether an address is in use, or was another project's not long
// ago.
func taken(ctx context.Context, tx *store.Tx, project, address string) (bool, error) {
	var n int
	err := tx.One(ctx, `select (select count(*) from inbox where address = $1) + (select count(*) from former_address where address = $1 and free_at > $2 and project_id <> $3)`,
		[]any{address, store.Time(time.Now()), project}, &n)
	if err != nil {
		return false, fmt.Errorf("look up address: %w", err)
	}
	return n > 0, nil
}

// free returns those of names that are free in domain, at most most of them, as
// addresses.
func free(ctx context.Context, tx *store.Tx, project string, names []string, domain string, most int) ([]string, error) {
	var out []string
	for _, name := range names {
		used, err := taken(ctx, tx, project, name+"@"+domain)
		if err != nil {
			return nil, err
		}
		if !used && len(out) < most {
			out = append(out, name+"@"+domain)
		}
	}
	return out, nil
}

// Suggest fills in what is free like the address that err says is taken.
func (d *Directory) Suggest(ctx context.Context, project string, err error) error {
	e, ok := errors.AsType[*TakenError](err)
	if !ok {
		return err
	}
	name, domain, _ := strings.Cut(e.Address, "@")
	verr := d.db.View(ctx, func(tx *store.Tx) (err error) {
		e.Suggestions, err = free(ctx, tx, project, like(name), domain, 3)
		return err
	})
	if verr != nil {
		return verr
	}
	return err
}
