package policy_test

import (
	"fmt"

	"postern/internal/policy"
)

// A document is a list of rules. The mode of the inbox says what happens where no
// rule matches.
func ExampleDecide() {
	doc, err := policy.Parse([]byte(`
rules:
  - id: no-rivals
    kind: email.send
    when: to.exists(a, a.endsWith("@rival.example"))
    then: deny
    reason: no mail to rivals
  - id: large-files
    kind: email.send
    when: size > 1000000
    then: ask
    approvers: 2
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, r := range []policy.Request{
		{Kind: policy.KindSend, Mode: policy.GatedSend, To: []string{"eve@rival.example"}},
		{Kind: policy.KindSend, Mode: policy.GatedSend, To: []string{"bob@example.com"}, Size: 2_000_000},
		{Kind: policy.KindSend, Mode: policy.GatedSend, To: []string{"bob@example.com"}, Size: 2_000},
		{Kind: policy.KindSend, Mode: policy.Autonomous, To: []string{"bob@example.com"}, Size: 2_000, Listed: true},
	} {
		v := policy.Decide(doc, r)
		fmt.Printf("%s by %s, approvers %d\n", v.Effect, v.Rule, v.Approvers)
	}
	// Output:
	// deny by no-rivals, approvers 0
	// ask by large-files, approvers 2
	// ask by gated_send, approvers 0
	// allow by autonomous, approvers 0
}

// A document with a mistake is refused with the line, the field and the way out.
func ExampleParse() {
	_, err := policy.Parse([]byte("rules:\n  - id: mail\n    kind: email.send\n    then: perhaps\n"))
	fmt.Println(err)
	// Output:
	// invalid policy: line 4: rules[0].then: "perhaps": must be allow, ask or deny
}

// A sandbox may narrow what its project allows, and never widen it.
func ExampleNewOutbound() {
	_, err := policy.NewOutbound(
		policy.Egress{AllowOut: []string{"pypi.org", "*.example.com"}},
		policy.Ceiling{Allow: []string{"pypi.org"}},
	)
	fmt.Println(err)
	_, err = policy.NewOutbound(policy.Egress{AllowOut: []string{"https://pypi.org/simple"}}, policy.Ceiling{Internet: true})
	fmt.Println(err)
	// Output:
	// <nil>
	// invalid network policy: allowOut[0] "https://pypi.org/simple": must be an IP address, a CIDR prefix, a name or "*." and a name, and a name may have ":port"
}
