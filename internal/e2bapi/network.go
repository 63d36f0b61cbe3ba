package e2bapi

import (
	"fmt"
	"net/http"
	"strings"

	"postern/internal/auth"
	"postern/internal/policy"
)

// network holds the network settings of create.
type network struct {
	AllowOut           []string                  `json:"allowOut"`
	DenyOut            []string                  `json:"denyOut"`
	AllowPublicTraffic *bool                     `json:"allowPublicTraffic"`
	MaskRequestHost    string                    `json:"maskRequestHost"`
	HTTPSPorts         []int                     `json:"httpsPorts"`
	EgressProxy        *egressProxy              `json:"egressProxy"`
	Rules              map[string][]*networkRule `json:"rules"`
	Packages           []string                  `json:"packages"` // Postern's own
}

// egressProxy is E2B's object of that name. The password is never answered.
type egressProxy struct {
	Address  string      `json:"address"`
	Username string      `json:"username,omitempty"`
	Password auth.Secret `json:"password,omitempty"`
}

// networkRule is an entry of E2B's network.rules.
type networkRule struct {
	Transform *networkTransform `json:"transform,omitempty"`
}

// networkTransform is what a rule does to requests.
type networkTransform struct {
	Headers map[string]string `json:"headers,omitempty"`
	Only    *networkOnly      `json:"only,omitempty"` // Postern's own
}

// networkOnly bounds the requests that a rule is about, and drops other credentials.
type networkOnly struct {
	Methods []string `json:"methods,omitempty"`
	Paths   []string `json:"paths,omitempty"`
}

// iam is E2B's object of that name.
type iam struct {
	Tokens map[string]iamToken `json:"tokens"`
}

// iamToken is an entry of iam.tokens.
type iamToken struct {
	Audience  string `json:"audience"`
	TokenType string `json:"tokenType"`
}

// egress returns the requested network rules of a new sandbox. As in E2B, the default
// is the whole Internet; the project's ceiling limits it.
func (s *Server) egress(who auth.Principal, b *newSandbox) (policy.Egress, error) {
	e := policy.Egress{Internet: b.InternetAccess == nil || *b.InternetAccess}
	if b.IAM != nil && len(b.IAM.Tokens) > 0 {
		e.Tokens = map[string]policy.Token{}
		for name, t := range b.IAM.Tokens {
			e.Tokens[name] = policy.Token{Audience: t.Audience, Type: t.TokenType}
		}
	}
	if err := b.packages(&e); err != nil {
		return policy.Egress{}, err
	}
	if n := b.Network; n != nil {
		e.AllowOut, e.DenyOut = n.AllowOut, n.DenyOut
		if err := s.addRules(&e, who, n.Rules, n.EgressProxy); err != nil {
			return policy.Egress{}, err
		}
	}
	return e, e.Validate()
}

// PackagesMetadata is the metadata key whose value names the package registries
// that a new sandbox may read, such as "npm, pypi". Clients that can send it have
// the field network.packages instead.
const PackagesMetadata = "postern.packages"

// packages sets the package registries that are asked for.
func (b *newSandbox) packages(e *policy.Egress) (err error) {
	asked := b.Metadata[PackagesMetadata]
	if b.Network != nil {
		asked = strings.Join(append([]string{asked}, b.Network.Packages...), ",")
	}
	e.Packages, err = policy.ParsePackages(asked)
	return err
}

// addRules adds rules and a proxy to e, whose Tokens are known.
func (s *Server) addRules(e *policy.Egress, who auth.Principal, rules map[string][]*networkRule, proxy *egressProxy) error {
	given := map[string][]policy.Rule{}
	for domain, list := range rules {
		given[domain] = []policy.Rule{}
		for _, r := range list {
			var p policy.Rule
			if r != nil && r.Transform != nil {
				p.Headers = r.Transform.Headers
				if o := r.Transform.Only; o != nil {
					p.Only = &policy.Only{Methods: o.Methods, Paths: o.Paths}
				}
			}
			given[domain] = append(given[domain], p)
		}
	}
	var err error
	if e.Rules, err = policy.NewRules(given, e.Tokens); err != nil {
		return err
	}
	if proxy == nil {
		return nil
	}
	e.Proxy = &policy.Proxy{Address: proxy.Address, Username: proxy.Username}
	if proxy.Password == "" {
		return nil
	}
	if s.conf.SealProxy == nil {
		return fmt.Errorf("%w: network.egressProxy: %w", errRequest, errNotYet)
	}
	return s.conf.SealProxy(who.Project, e.Proxy, proxy.Password)
}

// networkOf returns the part of a sandbox's network that it asked for, as it was
// asked for. Placeholders stay what they are.
func networkOf(e policy.Egress) map[string]any {
	m := map[string]any{"allowOut": orEmpty(e.AllowOut), "denyOut": orEmpty(e.DenyOut)}
	if len(e.Rules) > 0 {
		rules := map[string][]networkRule{}
		for domain, list := range e.Rules {
			rules[domain] = []networkRule{}
			for _, r := range list {
				var n networkRule
				if r.Headers != nil || r.Only != nil {
					n.Transform = &networkTransform{Headers: r.Headers}
				}
				if r.Only != nil {
					n.Transform.Only = &networkOnly{Methods: r.Only.Methods, Paths: r.Only.Paths}
				}
				rules[domain] = append(rules[domain], n)
			}
		}
		m["rules"] = rules
	}
	if p := e.Proxy; p != nil {
		m["egressProxy"] = egressProxy{Address: p.Address, Username: p.Username}
	}
	return m
}

// setNetwork replaces the network rules of a sandbox. Omitted fields are cleared,
// as in E2B.
func (s *Server) setNetwork(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		AllowOut       []string                  `json:"allowOut"`
		DenyOut        []string                  `json:"denyOut"`
		EgressProxy    *egressProxy              `json:"egressProxy"`
		Rules          map[string][]*networkRule `json:"rules"`
		InternetAccess *bool                     `json:"allow_internet_access"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	id := shortID(r.PathValue("id"))
	i, err := s.fleet.Get(r.Context(), who, id)
	if err != nil {
		return err
	}
	e := policy.Egress{
		Internet: b.InternetAccess == nil || *b.InternetAccess, AllowOut: b.AllowOut, DenyOut: b.DenyOut,
		Tokens: i.Egress.Tokens, // which stay; rules may name them
		// These stay as well: its programs have the sentinels and the settings.
		Secrets: i.Egress.Secrets, Packages: i.Egress.Packages,
	}
	if err := s.addRules(&e, who, b.Rules, b.EgressProxy); err != nil {
		return err
	}
	if err := s.attachSecrets(r.Context(), who, nil, nil, &e); err != nil {
		return err
	}
	if err := s.fleet.SetEgress(r.Context(), who, id, e); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
