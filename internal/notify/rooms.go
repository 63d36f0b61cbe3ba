package notify

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/people"
	"postern/internal/policy"
	"postern/internal/publicnet"
	"postern/internal/store"
)

// ErrInvalid means that a setting of notices is not valid; the text says which one and
// why.
var ErrInvalid = errors.New("invalid setting of notices")

// maxRooms is how many rooms a project may have.
const maxRooms = 20

// A Room is a channel in Slack or in Microsoft Teams that gets a project's notices. Its
// credentials are encrypted.
type Room struct {
	ID        string
	Project   string
	Kind      Channel // Slack or Teams
	Name      string
	Channel   string // Slack's ID; empty for Teams
	Created   time.Time
	CreatedBy string // a principal
	Failed    string // why the newest message could not be sent; empty if it was

	sealed []byte
}

// A NewRoom is what a person types to set up a room.
type NewRoom struct {
	Kind    Channel
	Name    string      // shown to people
	Channel string      // Slack only: the channel's ID, "C0123456789"
	Token   auth.Secret // Slack only: the bot's token, "xoxb-…"
	Signing auth.Secret // Slack only: the app's signing secret; empty means that nobody decides there
	URL     auth.Secret // Teams only: the workflow's URL
}

// A roomSecret has the credentials that a room's row holds encrypted.
type roomSecret struct {
	Token   auth.Secret `json:"-"`
	Signing auth.Secret `json:"-"`
	URL     auth.Secret `json:"-"`
}

// marshal encodes the values, which [auth.Secret] itself does not reveal.
func (s *roomSecret) marshal() ([]byte, error) {
	return json.Marshal([]string{s.Token.Reveal(), s.Signing.Reveal(), s.URL.Reveal()})
}

func (s *roomSecret) unmarshal(b []byte) error {
	var v [3]string
	if err := json.Unmarshal(b, &v); err != nil {
		return errors.New("read credentials of room") // the error would quote them
	}
	s.Token, s.Signing, s.URL = auth.Secret(v[0]), auth.Secret(v[1]), auth.Secret(v[2])
	return nil
}

// bound returns the texts that the encrypted credentials of r are bound to. The attack:
// somebody who can write the database moves them to another project, or changes the
// channel.
func (r *Room) bound() []string {
	return []string{"room", r.Project, r.ID, string(r.Kind), r.Channel, r.CreatedBy}
}

const selectRooms = `select id, project_id, kind, name, channel, secret, created_at, created_by, failed from notify_room `

func scanRoom(row func(...any) error) (r Room, err error) {
	var at int64
	err = row(&r.ID, &r.Project, &r.Kind, &r.Name, &r.Channel, &r.sealed, &at, &r.CreatedBy, &r.Failed)
	r.Created = store.FromTime(at)
	return r, store.NotFound(err)
}

// roomsOf returns the rooms of a project, by name.
func (n *Notifier) roomsOf(ctx context.Context, tx *store.Tx, project string) ([]Room, error) {
	if n.conf.Box == nil {
		return nil, nil
	}
	rooms, err := store.List(ctx, tx, scanRoom, selectRooms+`where project_id = $1 order by name, id`, project)
	if err != nil {
		return nil, fmt.Errorf("list rooms: %w", err)
	}
	return rooms, nil
}

// roomByID returns a room; an empty project means any.
func (n *Notifier) roomByID(ctx context.Context, tx *store.Tx, project, id string) (Room, error) {
	r, err := scanRoom(tx.QueryRowContext(ctx, selectRooms+`where id = $1`, id).Scan)
	if err == nil && project != "" && r.Project != project {
		return Room{}, store.ErrNotFound
	}
	return r, err
}

// open decrypts the credentials of a room.
func (n *Notifier) open(r *Room) (s roomSecret, err error) {
	if n.conf.Box == nil {
		return s, ErrOff
	}
	plain, err := n.conf.Box.Open(r.sealed, r.bound()...)
	if err != nil {
		return s, err
	}
	defer clear(plain)
	return s, s.unmarshal(plain)
}

// Rooms returns the rooms of who's project. who must be a person.
func (n *Notifier) Rooms(ctx context.Context, who auth.Principal) (out []Room, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not list rooms, only a person may: %w", who, auth.ErrForbidden)
	}
	err = n.db.View(ctx, func(tx *store.Tx) error {
		out, err = n.roomsOf(ctx, tx, who.Project)
		return err
	})
	return out, err
}

// AddRoom sets up a room. who must be an owner with a fresh second factor.
func (n *Notifier) AddRoom(ctx context.Context, who auth.Principal, in NewRoom) (Room, error) {
	if n.conf.Box == nil {
		return Room{}, ErrOff
	}
	in.Name = strings.TrimSpace(in.Name)
	if err := n.checkRoom(in); err != nil {
		return Room{}, err
	}
	r := Room{ID: "rom_" + rand.Text(), Project: who.Project, Kind: in.Kind, Name: in.Name, Channel: in.Channel, Created: time.Now(), CreatedBy: who.String()}
	plain, err := (&roomSecret{in.Token, in.Signing, in.URL}).marshal()
	if err != nil {
		return Room{}, fmt.Errorf("set up room: %w", err)
	}
	defer clear(plain)
	r.sealed = n.conf.Box.Seal(plain, r.bound()...)
	err = n.db.Update(ctx, func(tx *store.Tx) error {
		if err := people.RequireManager(ctx, tx, who); err != nil {
			return err
		}
		others, err := n.roomsOf(ctx, tx, who.Project)
		if err != nil {
			return err
		}
		if len(others) >= maxRooms {
			return fmt.Errorf("%w: a project has at most %d rooms", ErrInvalid, maxRooms)
		}
		for _, o := range others {
			if o.Name == r.Name {
				return fmt.Errorf("%w: name: there is already a room of this name", ErrInvalid)
			}
		}
		_, err = tx.ExecContext(ctx, `insert into notify_room (id, project_id, kind, name, channel, secret, created_at, created_by, failed) values ($1, $2, $3, $4, $5, $6, $7, $8, '')`,
			r.ID, r.Project, r.Kind, r.Name, r.Channel, r.sealed, store.Time(r.Created), r.CreatedBy)
		if err != nil {
			return err
		}
		decides := "no"
		if in.Signing != "" {
			decides = "where policy says so"
		}
		return audit.Append(ctx, tx, who, audit.NotifyRoom, r.ID, audit.Fields{"kind": string(r.Kind), "name": r.Name, "channel": r.Channel, "decides": decides})
	})
	if err != nil {
		return Room{}, fmt.Errorf("set up room: %w", err)
	}
	return r, nil
}

// RemoveRoom ends a room: nothing more is sent there, and buttons there do nothing. who
// must be an owner with a fresh second factor.
func (n *Notifier) RemoveRoom(ctx context.Context, who auth.Principal, id string) error {
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		if err := people.RequireManager(ctx, tx, who); err != nil {
			return err
		}
		r, err := n.roomByID(ctx, tx, who.Project, id)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `delete from notify_room where id = $1`, id); err != nil {
			return err
		}
		// Messages there cannot be edited without the token.
		if _, err := tx.ExecContext(ctx, `update notice set open = 0 where person_id = $1`, id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.NotifyRoomRemove, r.ID, audit.Fields{"kind": string(r.Kind), "name": r.Name})
	})
	if err != nil {
		return fmt.Errorf("remove room: %w", err)
	}
	return nil
}

var (
	slackChannel = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[CG][A-Z0-9]{6,20}$`) })
	slackToken   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^xoxb-[A-Za-z0-9-]{10,250}$`) })
	slackSigning = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9a-f]{32}$`) })
)

// checkRoom checks what a person typed. Its errors never quote a credential.
func (n *Notifier) checkRoom(in NewRoom) error {
	bad := func(field, why string) error { return fmt.Errorf("%w: %s: %s", ErrInvalid, field, why) }
	if in.Name == "" || len(in.Name) > 80 || mail.Printable(in.Name, 200) != in.Name {
		return bad("name", "must be 1 to 80 visible characters")
	}
	switch in.Kind {
	case Slack:
		switch {
		case !slackChannel().MatchString(in.Channel):
			return bad("channel", "must be the channel's ID, such as C0123456789; Slack shows it at the bottom of the channel's details")
		case !slackToken().MatchString(in.Token.Reveal()):
			return bad("token", "must be the bot token of a Slack app; it begins with xoxb-")
		case in.Signing != "" && !slackSigning().MatchString(in.Signing.Reveal()):
			return bad("signing secret", "must be the signing secret of the Slack app, 32 digits 0-9 and a-f, or empty")
		case in.URL != "":
			return bad("url", "is for Teams only")
		}
		return nil
	case Teams:
		if in.Token != "" || in.Signing != "" || in.Channel != "" {
			return bad("url", "is all that Teams needs")
		}
		if err := checkPublicURL(in.URL.Reveal(), n.conf.Private); err != nil {
			return bad("url", err.Error())
		}
		return nil
	case Mail, Telegram, Push:
	}
	return bad("kind", "must be slack or teams")
}

// checkPublicURL checks the form of a URL to which this server will send. If its host is an
// IP address, that is checked too. The addresses of a host name are checked at each
// connection.
func checkPublicURL(s string, private bool) error {
	if len(s) > 2048 {
		return errors.New("is longer than 2048 bytes")
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }):
		return errors.New("is not a URL") // the error would quote it
	case u.Scheme != "https" && (u.Scheme != "http" || !private) || u.Host == "" || u.Opaque != "":
		return errors.New("must begin with https://")
	case u.User != nil || u.Fragment != "":
		return errors.New("must hold no user name, password or #fragment")
	}
	port := 443
	if u.Port() != "" {
		// Other ports below 1024 belong to protocols that could misread a request.
		if port, err = strconv.Atoi(u.Port()); err != nil || port > 65535 || port < 1024 && port != 443 && port != 80 {
			return errors.New("port: must be 443, 80 or 1024 to 65535")
		}
	}
	a, err := netip.ParseAddr(u.Hostname())
	if err != nil {
		if _, err := policy.Name(u.Hostname()); err != nil {
			return errors.New("the host is not a name")
		}
		return nil
	}
	g, err := publicnet.NewGuard(private)
	if err != nil {
		return err
	}
	return g.Check(netip.AddrPortFrom(a.WithZone(""), uint16(port)))
}

// sendOnce bounds one request to Slack, Teams or a push service.
const sendOnce = 15 * time.Second

// newPublicClient returns the client for webhooks and push services. The attack: somebody
// enters an address that leads to a service inside this network. Each address is checked
// right before the connection. Proxies of the environment are ignored, since the proxy's
// address would then be checked instead. Redirects are not followed.
func newPublicClient(c Config) (*http.Client, error) {
	g, err := publicnet.NewGuard(c.Private)
	if err != nil {
		return nil, err
	}
	return &http.Client{
		Timeout: sendOnce,
		Transport: &http.Transport{
			DialContext: g.Dial(c.Resolver, 10*time.Second), ForceAttemptHTTP2: true, TLSHandshakeTimeout: 10 * time.Second,
			MaxIdleConnsPerHost: 2, IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: 16 << 10, DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

// retryAfter reads the Retry-After header, in seconds or as a date, limited to an hour.
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if s, err := strconv.Atoi(v); err == nil {
		return time.Duration(min(max(s, 1), 3600)) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil {
		return min(max(time.Until(t), time.Second), time.Hour)
	}
	return 0
}

// noteRoom records the result of the newest message to a room.
func (n *Notifier) noteRoom(ctx context.Context, r Room, err error) {
	why := ""
	if err != nil {
		why = mail.Printable(err.Error(), 200)
	}
	uerr := n.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `update notify_room set failed = $1 where id = $2 and failed <> $1`, why, r.ID)
		return err
	})
	if uerr != nil {
		n.log.DebugContext(ctx, "record state of room", "room", r.ID, "err", uerr)
	}
}
