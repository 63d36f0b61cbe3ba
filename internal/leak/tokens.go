package leak

import (
	"encoding/base64"
	"hash/crc32"
	"strings"
	"sync"

	"postern/internal/extract"
)

// The alphabets of tokens.
const (
	digits = "0123456789"
	lowHex = digits + "abcdef"
	upper  = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	lower  = "abcdefghijklmnopqrstuvwxyz"
	alnum  = upper + lower + digits
)

// charsets are the names of alphabets in patterns.
var charsets = map[string]string{
	"digit": digits, "hex": lowHex, "HEX": lowHex + "ABCDEF", "upper": upper + digits, "lower": lower + digits,
	"alnum": alnum, "alnum-": alnum + "-", "alnum/": alnum + "/", "word": alnum + "_", "dotted": alnum + "-_.",
	"url": alnum + "-_", "url=": alnum + "-_=", "url%": alnum + "-_%", "url/": alnum + "-_/", "url/@": alnum + "-_/@",
	"base32": upper + "234567", "bech32": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
	"base64": alnum + "+/", "base64=": alnum + "+/=", "base64_": alnum + "+/=_",
	"azure": alnum + "-_~.", "query": alnum + "-_%=&:.", "sig": alnum + "-_%=+/",
}

type texts = []string

// A tokenRule describes the tokens of one service, so that they are found
// whatever stands around them.
type tokenRule struct {
	id       string                     // the name of the finding, for programs
	what     string                     // what the token is, for people
	patterns []string                   // literals and {charset:length} or {charset:min-max}
	near     []string                   // words of which one must stand shortly before the token, in lower case; none if the pattern is distinctive
	check    func(token string) verdict // nil if the token has neither checksum nor structure

	match []string // texts in which the rule must find a token; {…} as in patterns
	not   []string // texts in which it must not
}

// tokenRules are the tokens that are found by their shape. Only what is unlikely
// to be anything else is listed: a row of hexadecimal digits is a hash as well,
// and needs a word nearby.
//
// To add a service, add a row. TestTokenRules runs the examples of each.
var tokenRules = []tokenRule{
	// Clouds and hosting.
	{
		id: "aws_access_key", what: "AWS access key ID",
		patterns: texts{"AKIA{upper:16}", "ASIA{upper:16}", "ABIA{upper:16}", "ACCA{upper:16}", "A3T{upper:17}"},
		match:    texts{"AKIA{base32:16}", "(ASIA{base32:16})"},
		not:      texts{"AKIAIOSFODNN7EXAMPLE", "AKIA{upper:15}", "xAKIA{base32:16}"},
	},
	{
		id: "aws_secret_key", what: "AWS secret access key",
		patterns: texts{"{base64:40}"}, near: texts{"aws", "secret access key", "secretaccesskey"},
		check: mixed, match: texts{"my AWS secret: {base64:40}"},
		not: texts{"the digest is {base64:40}", "aws s3 cp s3://bucket/a/b/c/d/e/f/g/h/i/j/k.tar.gz"},
	},
	{
		id: "aws_bedrock_key", what: "Amazon Bedrock API key",
		patterns: texts{"ABSK{base64:109-269}", "bedrock-api-key-YmVkcm9jay5hbWF6b25hd3MuY29t{base64:20-2000}"},
		match:    texts{"ABSK{base64:128}"},
		not:      texts{"ABSK{base64:40}"},
	},
	{
		id: "alibaba_access_key", what: "Alibaba Cloud access key ID",
		patterns: texts{"LTAI{alnum:20}"},
		match:    texts{"LTAI{alnum:20}"},
		not:      texts{"LTAI{alnum:12}"},
	},
	{
		id: "azure_client_secret", what: "Azure client secret",
		patterns: texts{"{azure:3}8Q~{azure:31-34}", "{azure:3}7Q~{azure:31-34}"},
		match:    texts{"{azure:3}8Q~{url:34}"},
		not:      texts{"8Q~{url:34}", "abc8Q~short"},
	},
	{
		id: "azure_shared_access", what: "Azure shared access signature",
		patterns: texts{"{query:8-300}&sig={sig:40-80}"},
		match:    texts{"https://a.blob.core.windows.net/c?sv=2024-11-04&sp=r&sig={alnum:43}%3D"},
		not:      texts{"https://example.com/?a=1&sig=abc"},
	},
	{
		id: "azure_storage_key", what: "Azure storage or service bus key",
		patterns: texts{"AccountKey={base64=:86-88}", "SharedAccessKey={base64=:43-44}"},
		match:    texts{"AccountName=a;AccountKey={base64:86}==;"},
		not:      texts{"AccountKey=;EndpointSuffix=core.windows.net"},
	},
	{
		id: "google_api_key", what: "Google API key",
		patterns: texts{"AIza{url:35}"},
		match:    texts{"key=AIza{alnum:35}"},
		not:      texts{"AIza{alnum:20}"},
	},
	{
		id: "google_client_secret", what: "Google OAuth client secret",
		patterns: texts{"GOCSPX-{url:28}"},
		match:    texts{"GOCSPX-{url:28}"},
		not:      texts{"GOCSPX-{url:10}"},
	},
	{
		id: "google_access_token", what: "Google OAuth access token",
		patterns: texts{"ya29.{dotted:40-2048}"},
		match:    texts{"Bearer ya29.{url:120}"},
		not:      texts{"ya29.short"},
	},
	{
		id: "digitalocean_token", what: "DigitalOcean token",
		patterns: texts{"dop_v1_{hex:64}", "doo_v1_{hex:64}", "dor_v1_{hex:64}"},
		match:    texts{"dop_v1_{hex:64}"},
		not:      texts{"dop_v1_{hex:40}"},
	},
	{
		id: "heroku_key", what: "Heroku API key",
		patterns: texts{"HRKU-{url:36-70}"},
		match:    texts{"HRKU-AA{url:58}"},
		not:      texts{"HRKU-{url:8}"},
	},
	{
		id: "heroku_key", what: "Heroku API key",
		patterns: texts{"{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"}, near: texts{"heroku"},
		match: texts{"HEROKU_API_KEY={hex:8}-{hex:4}-4{hex:3}-8{hex:3}-{hex:12}"},
		not:   texts{"request {hex:8}-{hex:4}-4{hex:3}-8{hex:3}-{hex:12} failed"},
	},
	{
		id: "fly_token", what: "Fly.io access token",
		patterns: texts{"fo1_{url:43}", "FlyV1{url:60-2000}", "fm1a_{base64:100-2000}", "fm1r_{base64:100-2000}", "fm2_{base64:100-2000}"},
		match:    texts{"fo1_{url:43}", "fm2_{base64:160}"},
		not:      texts{"fm2_radio"},
	},
	{
		id: "netlify_token", what: "Netlify token",
		patterns: texts{"nfp_{alnum:36-40}"},
		match:    texts{"nfp_{alnum:36}"},
		not:      texts{"nfp_{alnum:20}"},
	},
	{
		id: "vercel_token", what: "Vercel token",
		patterns: texts{"vcp_{alnum:40-80}", "vck_{alnum:40-80}"},
		match:    texts{"vcp_{alnum:56}"},
		not:      texts{"vcp_{alnum:12}"},
	},
	{
		id: "render_key", what: "Render API key",
		patterns: texts{"rnd_{alnum:28-40}"},
		match:    texts{"rnd_{alnum:32}"},
		not:      texts{"rnd_seed"},
	},
	{
		id: "scalingo_token", what: "Scalingo API token",
		patterns: texts{"tk-us-{url:48}"},
		match:    texts{"tk-us-{url:48}"},
		not:      texts{"tk-us-{url:12}"},
	},
	{
		id: "supabase_token", what: "Supabase token",
		patterns: texts{"sbp_{hex:40}", "sb_secret_{url:22-60}"},
		match:    texts{"sbp_{hex:40}", "sb_secret_{url:32}"},
		not:      texts{"sb_publishable_{url:32}"},
	},
	{
		id: "planetscale_token", what: "PlanetScale token or password",
		patterns: texts{"pscale_tkn_{dotted:32-64}", "pscale_pw_{dotted:32-64}", "pscale_oauth_{dotted:32-64}"},
		match:    texts{"pscale_pw_{url:43}"},
		not:      texts{"pscale_pw_short"},
	},
	{
		id: "neon_key", what: "Neon API key",
		patterns: texts{"napi_{lower:60-70}"},
		match:    texts{"napi_{lower:64}"},
		not:      texts{"napi_{lower:10}"},
	},
	{
		id: "cloudflare_token", what: "Cloudflare API token",
		patterns: texts{"{url:40}"}, near: texts{"cloudflare", "cf_api", "cf-api"},
		check: mixed, match: texts{"Cloudflare API token: {url:40}"},
		not: texts{"commit {hex:40}"},
	},
	{
		id: "cloudflare_key", what: "Cloudflare global API key",
		patterns: texts{"{hex:37}"}, near: texts{"cloudflare", "cf_api", "cf-api"},
		match: texts{"CF_API_KEY={hex:37}"},
		not:   texts{"commit {hex:37}"},
	},
	{
		id: "cloudflare_origin_key", what: "Cloudflare Origin CA key",
		patterns: texts{"v1.0-{hex:24}-{hex:146}"},
		match:    texts{"v1.0-{hex:24}-{hex:146}"},
		not:      texts{"v1.0-{hex:24}"},
	},
	{
		id: "fastly_token", what: "Fastly API token",
		patterns: texts{"{url:32}"}, near: texts{"fastly"},
		check: mixed, match: texts{"FASTLY_KEY={alnum:32}"},
		not: texts{"etag {hex:32}"},
	},
	{
		id: "yandex_key", what: "Yandex Cloud key",
		patterns: texts{"AQVN{url:35-38}"},
		match:    texts{"AQVN{url:36}"},
		not:      texts{"AQVN{url:10}"},
	},

	// Source code, packages, builds.
	{
		id: "github_token", what: "GitHub token",
		patterns: texts{"ghp_{alnum:36}", "gho_{alnum:36}", "ghu_{alnum:36}", "ghs_{alnum:36}"}, check: checksum62,
		match: texts{"ghp_{alnum:36}", "gho_{alnum:36}."},
		not:   texts{"ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "ghp_{alnum:20}"},
	},
	{
		id: "github_token", what: "GitHub token",
		patterns: texts{"ghr_{alnum:36-76}", "github_pat_{word:82}"},
		match:    texts{"github_pat_{alnum:22}_{alnum:59}", "ghr_{alnum:76}"},
		not:      texts{"github_pat_{alnum:22}"},
	},
	{
		id: "npm_token", what: "npm access token",
		patterns: texts{"npm_{alnum:36}"}, check: checksum62,
		match: texts{"//registry.npmjs.org/:_authToken=npm_{alnum:36}"},
		not:   texts{"npm_config_registry", "npm_{alnum:35}"},
	},
	{id: "gitlab_token", what: "GitLab token", patterns: texts{
		"glpat-{dotted:20-300}", "gldt-{url:20-60}", "glrt-{dotted:20-300}", "glptt-{url:20-60}", "glcbt-{url:20-80}", "glft-{url:20-60}", "glimt-{url:20-60}",
		"glagent-{url:40-80}", "gloas-{url:40-80}", "glsoat-{url:20-60}", "glffct-{url:20-60}", "GR1348941{url:20}",
	}, match: texts{"glpat-{url:20}", "glrt-t1_{url:27}.01.{lower:9}", "GR1348941{url:20}"}, not: texts{"glpat-{url:10}", "glide-{url:20}"}},
	{
		id: "gitlab_session", what: "GitLab session cookie",
		patterns: texts{"_gitlab_session={lower:32}"},
		match:    texts{"Cookie: _gitlab_session={hex:32}"},
		not:      texts{"_gitlab_session=expired"},
	},
	{
		id: "pypi_token", what: "PyPI upload token",
		patterns: texts{"pypi-AgEIcHlwaS5vcmc{url:50-1000}", "pypi-AgENdGVzdC5weXBpLm9yZ{url:50-1000}"},
		match:    texts{"pypi-AgEIcHlwaS5vcmc{url:150}"},
		not:      texts{"pypi-server"},
	},
	{
		id: "rubygems_key", what: "RubyGems API key",
		patterns: texts{"rubygems_{hex:48}"},
		match:    texts{"rubygems_{hex:48}"},
		not:      texts{"rubygems_{hex:20}"},
	},
	{
		id: "crates_token", what: "crates.io token",
		patterns: texts{"cio{alnum:32}"},
		match:    texts{"cio{alnum:32}"},
		not:      texts{"cio{alnum:20}"},
	},
	{
		id: "clojars_token", what: "Clojars deploy token",
		patterns: texts{"CLOJARS_{lower:60}"},
		match:    texts{"CLOJARS_{hex:60}"},
		not:      texts{"CLOJARS_USERNAME"},
	},
	{
		id: "nuget_key", what: "NuGet API key",
		patterns: texts{"oy2{lower:43}"},
		match:    texts{"oy2{lower:43}"},
		not:      texts{"oy2{lower:20}"},
	},
	{
		id: "docker_token", what: "Docker Hub token",
		patterns: texts{"dckr_pat_{url:27-40}", "dckr_oat_{url:27-60}"},
		match:    texts{"dckr_pat_{url:27}"},
		not:      texts{"dckr_pat_{url:8}"},
	},
	{
		id: "artifactory_token", what: "JFrog Artifactory token",
		patterns: texts{"AKCp{alnum:69}", "cmVmd{alnum:59}"},
		match:    texts{"AKCp{alnum:69}", "cmVmd{alnum:59}"},
		not:      texts{"AKCp{alnum:20}"},
	},
	{
		id: "bitbucket_token", what: "Bitbucket app password or token",
		patterns: texts{"ATBB{alnum:32}", "ATCTT3{url=:150-250}"},
		match:    texts{"ATBB{alnum:32}"},
		not:      texts{"ATBB{alnum:12}"},
	},
	{
		id: "sourcegraph_token", what: "Sourcegraph access token",
		patterns: texts{"sgp_{HEX:40}", "sgp_{HEX:16}_{HEX:40}", "sgp_local_{HEX:40}"},
		match:    texts{"sgp_{hex:16}_{hex:40}"},
		not:      texts{"sgp_{hex:12}"},
	},
	{
		id: "sonar_token", what: "SonarQube token",
		patterns: texts{"squ_{hex:40}", "sqp_{hex:40}", "sqa_{hex:40}"},
		match:    texts{"sonar.token=squ_{hex:40}"},
		not:      texts{"squ_{hex:12}"},
	},
	{
		id: "snyk_token", what: "Snyk API token",
		patterns: texts{"{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"}, near: texts{"snyk_token", "snyk token", "snyk api"},
		match: texts{"SNYK_TOKEN={hex:8}-{hex:4}-4{hex:3}-9{hex:3}-{hex:12}"},
		not:   texts{"Snyk issue, see ticket 4711"},
	},
	{
		id: "circleci_token", what: "CircleCI token",
		patterns: texts{"CCIPAT_{word:40-90}", "CCIPRJ_{word:40-90}"},
		match:    texts{"CCIPAT_{alnum:22}_{hex:40}"},
		not:      texts{"CCIPAT_{alnum:8}"},
	},
	{
		id: "buildkite_token", what: "Buildkite token",
		patterns: texts{"bkua_{hex:40}"},
		match:    texts{"bkua_{hex:40}"},
		not:      texts{"bkua_{hex:8}"},
	},
	{
		id: "octopus_key", what: "Octopus Deploy API key",
		patterns: texts{"API-{upper:25-28}"},
		match:    texts{"API-{upper:26}"},
		not:      texts{"API-REFERENCE", "API-{upper:12}"},
	},
	{
		id: "harness_key", what: "Harness token",
		patterns: texts{"pat.{url:22}.{alnum:24}.{alnum:20}", "sat.{url:22}.{alnum:24}.{alnum:20}"},
		match:    texts{"pat.{url:22}.{hex:24}.{alnum:20}"},
		not:      texts{"pat.example.com"},
	},
	{
		id: "infracost_key", what: "Infracost API token",
		patterns: texts{"ico-{alnum:32}"},
		match:    texts{"ico-{alnum:32}"},
		not:      texts{"ico-image"},
	},
	{
		id: "prefect_key", what: "Prefect API key",
		patterns: texts{"pnu_{alnum:36}"},
		match:    texts{"pnu_{alnum:36}"},
		not:      texts{"pnu_{alnum:8}"},
	},
	{
		id: "readme_key", what: "ReadMe API key",
		patterns: texts{"rdme_{lower:70}"},
		match:    texts{"rdme_{lower:70}"},
		not:      texts{"rdme_file"},
	},
	{
		id: "terraform_token", what: "Terraform Cloud token",
		patterns: texts{"{alnum:14}.atlasv1.{url:60-70}"},
		match:    texts{"{alnum:14}.atlasv1.{url:67}"},
		not:      texts{"the .atlasv1. infix"},
	},
	{
		id: "pulumi_token", what: "Pulumi access token",
		patterns: texts{"pul-{hex:40}"},
		match:    texts{"pul-{hex:40}"},
		not:      texts{"pul-{hex:7}"},
	},
	{
		id: "doppler_token", what: "Doppler token",
		patterns: texts{"dp.pt.{alnum:40-44}", "dp.st.{dotted:40-80}", "dp.ct.{alnum:40-44}", "dp.sa.{alnum:40-44}", "dp.scim.{alnum:40-44}", "dp.audit.{alnum:40-44}"},
		match:    texts{"dp.pt.{alnum:43}", "dp.st.prd.{alnum:43}"},
		not:      texts{"dp.pt.short"},
	},
	{
		id: "vault_token", what: "HashiCorp Vault token",
		patterns: texts{"hvs.{url:24-300}", "hvb.{url:24-300}"},
		match:    texts{"X-Vault-Token: hvs.{url:95}"},
		not:      texts{"hvs.example.com"},
	},
	{
		id: "vault_token", what: "HashiCorp Vault token",
		patterns: texts{"s.{alnum:24}"}, near: texts{"vault"},
		check: mixed, match: texts{"VAULT_TOKEN=s.{alnum:24}"},
		not: texts{"s.{alnum:24}"},
	},
	{
		id: "tailscale_key", what: "Tailscale key",
		patterns: texts{"tskey-{alnum-:20-80}"},
		match:    texts{"tskey-auth-{alnum:12}CNTRL-{alnum:32}"},
		not:      texts{"tskey-auth"},
	},
	{
		id: "databricks_token", what: "Databricks token",
		patterns: texts{"dapi{hex:32-34}"},
		match:    texts{"dapi{hex:32}"},
		not:      texts{"dapi{hex:12}"},
	},
	{
		id: "openshift_token", what: "OpenShift token",
		patterns: texts{"sha256~{url:43}"},
		match:    texts{"oc login --token=sha256~{url:43}"},
		not:      texts{"sha256:{hex:64}"},
	},

	// Models.
	{
		id: "anthropic_key", what: "Anthropic API key",
		patterns: texts{"sk-ant-{url:32-200}"},
		match:    texts{"sk-ant-api03-{url:93}AA"},
		not:      texts{"sk-ant-{url:8}"},
	},
	{
		id: "openai_key", what: "OpenAI API key",
		patterns: texts{"sk-proj-{url:32-250}", "sk-svcacct-{url:32-250}", "sk-admin-{url:32-250}", "sk-None-{url:32-250}", "sk-{alnum:48}"},
		match:    texts{"sk-proj-{url:74}T3BlbkFJ{url:74}", "sk-{alnum:20}T3BlbkFJ{alnum:20}"},
		not:      texts{"sk-your-key-here", "sk-{alnum:12}"},
	},
	{
		id: "deepseek_key", what: "DeepSeek API key",
		patterns: texts{"sk-{hex:32}"}, near: texts{"deepseek"},
		match: texts{"DEEPSEEK_API_KEY=sk-{hex:32}"},
		not:   texts{"css class sk-{hex:32}"},
	},
	{
		id: "openrouter_key", what: "OpenRouter API key",
		patterns: texts{"sk-or-v1-{hex:64}"},
		match:    texts{"sk-or-v1-{hex:64}"},
		not:      texts{"sk-or-v1-{hex:10}"},
	},
	{
		id: "langfuse_key", what: "Langfuse secret key",
		patterns: texts{"sk-lf-{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"},
		match:    texts{"sk-lf-{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"},
		not:      texts{"pk-lf-{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"},
	},
	{
		id: "langsmith_key", what: "LangSmith API key",
		patterns: texts{"lsv2_pt_{word:32-60}", "lsv2_sk_{word:32-60}"},
		match:    texts{"lsv2_pt_{hex:32}_{hex:10}"},
		not:      texts{"lsv2_pt_{hex:8}"},
	},
	{
		id: "xai_key", what: "xAI API key",
		patterns: texts{"xai-{alnum:70-90}"},
		match:    texts{"xai-{alnum:80}"},
		not:      texts{"xai-{alnum:20}"},
	},
	{
		id: "groq_key", what: "Groq API key",
		patterns: texts{"gsk_{alnum:50-60}"},
		match:    texts{"gsk_{alnum:52}"},
		not:      texts{"gsk_{alnum:20}"},
	},
	{
		id: "replicate_token", what: "Replicate API token",
		patterns: texts{"r8_{alnum:37-40}"},
		match:    texts{"r8_{alnum:37}"},
		not:      texts{"r8_{alnum:10}"},
	},
	{
		id: "perplexity_key", what: "Perplexity API key",
		patterns: texts{"pplx-{alnum:40-56}"},
		match:    texts{"pplx-{alnum:48}"},
		not:      texts{"pplx-{alnum:10}"},
	},
	{
		id: "huggingface_token", what: "Hugging Face token",
		patterns: texts{"hf_{alnum:34-40}", "api_org_{alnum:34}"},
		match:    texts{"hf_{alnum:34}", "api_org_{alnum:34}"},
		not:      texts{"hf_hub_download", "api_org_settings"},
	},
	{
		id: "nvidia_key", what: "NVIDIA API key",
		patterns: texts{"nvapi-{url:60-70}"},
		match:    texts{"nvapi-{url:64}"},
		not:      texts{"nvapi-{url:10}"},
	},
	{
		id: "pinecone_key", what: "Pinecone API key",
		patterns: texts{"pcsk_{word:60-80}"},
		match:    texts{"pcsk_{alnum:6}_{alnum:63}"},
		not:      texts{"pcsk_{alnum:10}"},
	},
	{
		id: "tavily_key", what: "Tavily API key",
		patterns: texts{"tvly-{alnum-:28-60}"},
		match:    texts{"tvly-dev-{alnum:32}"},
		not:      texts{"tvly-{alnum:8}"},
	},
	{
		id: "elevenlabs_key", what: "ElevenLabs API key",
		patterns: texts{"sk_{hex:48}"},
		match:    texts{"xi-api-key: sk_{hex:48}"},
		not:      texts{"sk_{hex:20}"},
	},
	{
		id: "clickhouse_key", what: "ClickHouse Cloud key",
		patterns: texts{"4b1d{alnum:38}"},
		match:    texts{"4b1d{alnum:38}"},
		not:      texts{"4b1d{hex:36}{hex:4}"},
	},

	// Payments and commerce.
	{
		id: "stripe_key", what: "Stripe secret key",
		patterns: texts{"sk_live_{alnum:16-250}", "sk_test_{alnum:16-250}", "sk_prod_{alnum:16-250}", "rk_live_{alnum:16-250}", "rk_test_{alnum:16-250}", "rk_prod_{alnum:16-250}"},
		match:    texts{"sk_live_{alnum:24}", "rk_test_{alnum:99}"},
		not:      texts{"pk_live_{alnum:24}", "sk_live_{alnum:8}"},
	},
	{
		id: "webhook_secret", what: "webhook signing secret",
		patterns: texts{"whsec_{base64=:24-100}"},
		match:    texts{"whsec_{base64:32}"},
		not:      texts{"whsec_test"},
	},
	{
		id: "square_token", what: "Square access token",
		patterns: texts{"sq0atp-{url:22}", "sq0csp-{url:43}", "EAAA{url:60}"},
		match:    texts{"sq0atp-{url:22}", "EAAA{url:60}"},
		not:      texts{"sq0atp-{url:8}"},
	},
	{
		id: "shopify_token", what: "Shopify token",
		patterns: texts{"shpat_{HEX:32}", "shpss_{HEX:32}", "shpca_{HEX:32}", "shppa_{HEX:32}"},
		match:    texts{"shpat_{hex:32}"},
		not:      texts{"shpat_{hex:12}"},
	},
	{
		id: "flutterwave_key", what: "Flutterwave secret key",
		patterns: texts{"FLWSECK-{lower:32}-X", "FLWSECK_TEST-{lower:32}-X", "FLWSECK_TEST-{lower:12}"},
		match:    texts{"FLWSECK_TEST-{hex:32}-X"},
		not:      texts{"FLWPUBK_TEST-{hex:32}-X"},
	},
	{
		id: "plaid_token", what: "Plaid access token",
		patterns: texts{"access-sandbox-{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}", "access-development-{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}", "access-production-{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"},
		match:    texts{"access-production-{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"},
		not:      texts{"access-production-database"},
	},
	{
		id: "shippo_token", what: "Shippo token",
		patterns: texts{"shippo_live_{HEX:40}", "shippo_test_{HEX:40}"},
		match:    texts{"shippo_live_{hex:40}"},
		not:      texts{"shippo_live_{hex:10}"},
	},
	{
		id: "easypost_key", what: "EasyPost API key",
		patterns: texts{"EZAK{alnum:54}", "EZTK{alnum:54}"},
		match:    texts{"EZAK{alnum:54}"},
		not:      texts{"EZAK{alnum:10}"},
	},
	{
		id: "duffel_token", what: "Duffel token",
		patterns: texts{"duffel_live_{url=:43}", "duffel_test_{url=:43}"},
		match:    texts{"duffel_live_{url:43}"},
		not:      texts{"duffel_live_{url:10}"},
	},
	{
		id: "adobe_client_secret", what: "Adobe client secret",
		patterns: texts{"p8e-{alnum:32}"},
		match:    texts{"p8e-{alnum:32}"},
		not:      texts{"p8e-{alnum:8}"},
	},

	// Mail, chat and calls.
	{
		id: "slack_token", what: "Slack token",
		patterns: texts{"xoxc-{alnum-:20-200}", "xoxd-{url%:20-300}", "xoxr-{alnum-:20-200}", "xoxb-{alnum-:20-200}", "xoxp-{alnum-:20-200}", "xoxa-{alnum-:20-200}", "xoxs-{alnum-:20-200}", "xoxo-{alnum-:20-200}", "xoxe-{alnum-:20-250}", "xoxe.xoxp-{alnum-:20-250}", "xoxe.xoxb-{alnum-:20-250}", "xapp-{alnum-:20-200}"},
		match:    texts{"xoxb-{digit:12}-{digit:12}-{alnum:24}", "xoxe.xoxp-1-{upper:163}", "xapp-1-{upper:11}-{digit:13}-{hex:64}"},
		not:      texts{"xoxb-{digit:4}"},
	},
	{
		id: "slack_webhook", what: "Slack webhook",
		patterns: texts{"hooks.slack.com/services/{alnum/:40-60}", "hooks.slack.com/workflows/{alnum/:40-90}", "hooks.slack.com/triggers/{alnum/:40-90}"},
		match:    texts{"https://hooks.slack.com/services/T{upper:8}/B{upper:10}/{alnum:24}"},
		not:      texts{"https://hooks.slack.com/services/"},
	},
	{
		id: "discord_webhook", what: "Discord webhook",
		patterns: texts{"discord.com/api/webhooks/{url/:80-110}", "discordapp.com/api/webhooks/{url/:80-110}"},
		match:    texts{"https://discord.com/api/webhooks/{digit:18}/{url:68}"},
		not:      texts{"https://discord.com/api/webhooks/{digit:18}"},
	},
	{
		id: "discord_bot_token", what: "Discord bot token",
		patterns: texts{"{url:24-28}.{url:6}.{url:27-40}"}, near: texts{"discord"},
		check: mixed, match: texts{"DISCORD_TOKEN=M{alnum:23}.{url:6}.{url:38}"},
		not: texts{"discord.com/developers"},
	},
	{
		id: "teams_webhook", what: "Microsoft Teams webhook",
		patterns: texts{"{alnum-:1-60}.webhook.office.com/{url/@:60-300}"},
		match:    texts{"https://acme.webhook.office.com/webhookb2/{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}@{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}/IncomingWebhook/{hex:32}/{hex:8}-{hex:4}"},
		not:      texts{"https://acme.webhook.office.com/"},
	},
	{
		id: "telegram_bot_token", what: "Telegram bot token",
		patterns: texts{"{digit:8-10}:AA{url:33}"},
		match:    texts{"{digit:10}:AA{url:33}"},
		not:      texts{"10:AAM", "{digit:10}:AA{url:10}"},
	},
	{
		id: "twilio_key", what: "Twilio API key or token",
		patterns: texts{"SK{hex:32}", "AC{hex:32}", "{hex:32}"}, near: texts{"twilio"},
		match: texts{"Twilio auth token: {hex:32}", "TWILIO_API_KEY=SK{hex:32}"},
		not:   texts{"etag {hex:32}"},
	},
	{
		id: "sendgrid_key", what: "SendGrid API key",
		patterns: texts{"SG.{dotted:60-70}"},
		match:    texts{"SG.{url:22}.{url:43}"},
		not:      texts{"SG.{url:20}"},
	},
	{
		id: "mailgun_key", what: "Mailgun API key",
		patterns: texts{"key-{hex:32}"},
		match:    texts{"key-{hex:32}"},
		not:      texts{"key-{hex:12}"},
	},
	{
		id: "mailgun_key", what: "Mailgun signing key",
		patterns: texts{"{hex:32}-{hex:8}-{hex:8}"}, near: texts{"mailgun"},
		match: texts{"mailgun key {hex:32}-{hex:8}-{hex:8}"},
		not:   texts{"{hex:32}-{hex:8}-{hex:8}"},
	},
	{
		id: "mailchimp_key", what: "Mailchimp API key",
		patterns: texts{"{hex:32}-us{digit:1-2}"},
		match:    texts{"{hex:32}-us21"},
		not:      texts{"{hex:20}-us21"},
	},
	{
		id: "brevo_key", what: "Brevo API key",
		patterns: texts{"xkeysib-{hex:64}-{alnum:16}", "xsmtpsib-{hex:64}-{alnum:16}"},
		match:    texts{"xkeysib-{hex:64}-{alnum:16}"},
		not:      texts{"xkeysib-{hex:10}"},
	},
	{
		id: "resend_key", what: "Resend API key",
		patterns: texts{"re_{alnum:8}_{alnum:20-30}"},
		match:    texts{"re_{alnum:8}_{alnum:24}"},
		not:      texts{"re_compile_all"},
	},
	{
		id: "postmark_token", what: "Postmark server token",
		patterns: texts{"{hex:8}-{hex:4}-{hex:4}-{hex:4}-{hex:12}"}, near: texts{"postmark"},
		match: texts{"X-Postmark-Server-Token: {hex:8}-{hex:4}-4{hex:3}-8{hex:3}-{hex:12}"},
		not:   texts{"message {hex:8}-{hex:4}-4{hex:3}-8{hex:3}-{hex:12}"},
	},
	{
		id: "facebook_token", what: "Facebook access token",
		patterns: texts{"EAAM{alnum:100-300}", "EAAC{alnum:100-300}"},
		match:    texts{"EAAC{alnum:160}"},
		not:      texts{"EAAC{alnum:20}"},
	},
	{
		id: "twitter_token", what: "X bearer token",
		patterns: texts{"AAAAAAAAAAAAAAAAAAAAAA{url%:80-100}"},
		match:    texts{"Bearer AAAAAAAAAAAAAAAAAAAAAA{alnum:90}"},
		not:      texts{"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"},
	},

	// Work.
	{
		id: "atlassian_token", what: "Atlassian API token",
		patterns: texts{"ATATT3{url=:150-250}"},
		match:    texts{"ATATT3{url:180}=1A2B3C4D"},
		not:      texts{"ATATT3{url:20}"},
	},
	{
		id: "linear_key", what: "Linear API key",
		patterns: texts{"lin_api_{alnum:40}", "lin_oauth_{hex:64}"},
		match:    texts{"lin_api_{alnum:40}"},
		not:      texts{"lin_api_{alnum:8}"},
	},
	{
		id: "notion_token", what: "Notion token",
		patterns: texts{"ntn_{alnum:43-50}", "secret_{alnum:43}"},
		match:    texts{"ntn_{digit:11}{alnum:35}", "secret_{alnum:43}"},
		not:      texts{"secret_{alnum:20}"},
	},
	{
		id: "airtable_token", what: "Airtable token",
		patterns: texts{"pat{alnum:14}.{hex:64}"},
		match:    texts{"pat{alnum:14}.{hex:64}"},
		not:      texts{"pat{alnum:14}.example"},
	},
	{
		id: "figma_token", what: "Figma token",
		patterns: texts{"figd_{url:38-60}"},
		match:    texts{"figd_{url:40}"},
		not:      texts{"figd_{url:8}"},
	},
	{
		id: "postman_key", what: "Postman API key",
		patterns: texts{"PMAK-{hex:24}-{hex:34}"},
		match:    texts{"PMAK-{hex:24}-{hex:34}"},
		not:      texts{"PMAK-{hex:24}"},
	},
	{
		id: "contentful_token", what: "Contentful token",
		patterns: texts{"CFPAT-{url:43}"},
		match:    texts{"CFPAT-{url:43}"},
		not:      texts{"CFPAT-{url:8}"},
	},
	{
		id: "typeform_token", what: "Typeform token",
		patterns: texts{"tfp_{dotted:55-62}"},
		match:    texts{"tfp_{url:59}"},
		not:      texts{"tfp_{url:8}"},
	},
	{
		id: "frameio_token", what: "Frame.io token",
		patterns: texts{"fio-u-{url=:64}"},
		match:    texts{"fio-u-{url:64}"},
		not:      texts{"fio-u-{url:8}"},
	},
	{
		id: "dropbox_token", what: "Dropbox access token",
		patterns: texts{"sl.{url=:130-1500}"},
		match:    texts{"sl.{url:135}"},
		not:      texts{"sl.wikipedia.org"},
	},
	{
		id: "okta_token", what: "Okta API token",
		patterns: texts{"00{url:40}"}, near: texts{"okta", "ssws"},
		check: mixed, match: texts{"Authorization: SSWS 00{url:40}"},
		not: texts{"00{url:40}"},
	},
	{
		id: "algolia_key", what: "Algolia API key",
		patterns: texts{"{hex:32}"}, near: texts{"algolia"},
		match: texts{"ALGOLIA_ADMIN={hex:32}"},
		not:   texts{"md5 {hex:32}"},
	},
	{
		id: "onepassword_token", what: "1Password secret key or service account",
		patterns: texts{"A3-{upper:6}-{upper:11}-{upper:5}-{upper:5}-{upper:5}", "A3-{upper:6}-{upper:6}-{upper:5}-{upper:5}-{upper:5}-{upper:5}", "ops_eyJ{base64:250-2000}"},
		match:    texts{"A3-{upper:6}-{upper:6}-{upper:5}-{upper:5}-{upper:5}-{upper:5}", "ops_eyJ{base64:300}"},
		not:      texts{"A3-paper"},
	},
	{
		id: "age_key", what: "age secret key",
		patterns: texts{"AGE-SECRET-KEY-1{bech32:58}"},
		match:    texts{"AGE-SECRET-KEY-1{bech32:58}"},
		not:      texts{"AGE-SECRET-KEY-1..."},
	},

	// Watching.
	{
		id: "newrelic_key", what: "New Relic key",
		patterns: texts{"NRAK-{alnum:27}", "NRII-{url:32}", "NRIQ-{url:32}", "NRJS-{hex:19}"},
		match:    texts{"NRAK-{upper:27}", "NRII-{url:32}"},
		not:      texts{"NRAK-{upper:8}"},
	},
	{
		id: "grafana_token", what: "Grafana token",
		patterns: texts{"glsa_{alnum:32}_{HEX:8}", "glc_{base64=:32-400}"},
		match:    texts{"glsa_{alnum:32}_{hex:8}", "glc_eyJ{base64:80}"},
		not:      texts{"glc_{alnum:8}", "glsa_{alnum:12}"},
	},
	{
		id: "sentry_token", what: "Sentry token",
		patterns: texts{"sntrys_{base64_:60-500}", "sntryu_{hex:64}"},
		match:    texts{"sntryu_{hex:64}", "sntrys_eyJ{base64:100}_{base64:43}"},
		not:      texts{"sntrys_{alnum:8}"},
	},
	{
		id: "dynatrace_token", what: "Dynatrace API token",
		patterns: texts{"dt0c01.{upper:24}.{upper:64}", "dt0s01.{upper:24}.{upper:64}", "dt0s16.{upper:24}.{upper:64}"},
		match:    texts{"dt0c01.{upper:24}.{upper:64}"},
		not:      texts{"dt0c01.{upper:24}"},
	},
	{
		id: "datadog_key", what: "Datadog API or application key",
		patterns: texts{"{hex:32}", "{hex:40}"}, near: texts{"datadog", "dd_api", "dd-api", "dd_app"},
		match: texts{"DD_API_KEY={hex:32}", "the Datadog app key is {hex:40}"},
		not:   texts{"commit {hex:40}", "md5 {hex:32}"},
	},
	{
		id: "maxmind_key", what: "MaxMind license key",
		patterns: texts{"{alnum:6}_{alnum:29}_mmk"},
		match:    texts{"{alnum:6}_{alnum:29}_mmk"},
		not:      texts{"_mmk"},
	},
	{
		id: "sumologic_key", what: "Sumo Logic access key",
		patterns: texts{"{alnum:64}"}, near: texts{"sumo"},
		check: mixed, match: texts{"SUMO_ACCESS_KEY={alnum:64}"},
		not: texts{"sha256 {hex:64}"},
	},

	// Ours, and what any service may issue.
	{
		id: "postern_project_key", what: "Postern project key",
		patterns: texts{"e2b_{hex:40}"},
		match:    texts{"e2b_{hex:40}"},
		not:      texts{"e2b_{hex:12}"},
	},
	{
		id: "postern_inbox_key", what: "Postern inbox key",
		patterns: texts{"pib_{base32:26}"},
		match:    texts{"pib_{base32:26}"},
		not:      texts{"pib_{base32:10}"},
	},
	{
		id: "postern_grant", what: "Postern grant",
		patterns: texts{"pgr_{base32:26}"},
		match:    texts{"pgr_{base32:26}"},
		not:      texts{"pgr_{base32:10}"},
	},
	{
		id: "postern_recovery_key", what: "Postern recovery key",
		patterns: texts{"prk_{base32:26}"},
		match:    texts{"prk_{base32:26}"},
		not:      texts{"prk_{base32:10}"},
	},
	{
		id: "json_web_token", what: "JSON Web Token",
		patterns: texts{"eyJ{dotted:40-8000}"}, check: jsonWebToken,
		match: texts{"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI0NzExIn0.{url:43}"},
		not:   texts{"eyJhbGciOiJub25lIn0.eyJzdWIiOiI0NzExIn0.{url:43}", "eyJhIjoxLCJiIjoyLCJjIjozLCJkIjo0LCJlIjo1fQ"},
	},
	{
		id: "http_credentials", what: "credentials of an HTTP request",
		patterns: texts{"Authorization: Basic {base64=:12-400}", "authorization: Basic {base64=:12-400}", "Authorization: basic {base64=:12-400}"},
		match:    texts{"curl -H 'Authorization: Basic YW5uYTpTMW1tZXIyNng='"},
		not:      texts{"Authorization: Basic realm", "Authorization: Basic <credentials>"},
	},
	{
		id: "http_credentials", what: "credentials of an HTTP request",
		patterns: texts{"Authorization: Bearer {base64_:20-4000}", "authorization: Bearer {base64_:20-4000}", "Authorization: bearer {base64_:20-4000}"},
		match:    texts{"Authorization: Bearer {alnum:40}"},
		not:      texts{"Authorization: Bearer $TOKEN", "Authorization: Bearer YOUR_ACCESS_TOKEN_GOES_HERE"},
	},
}

// A verdict is what a check says of a token.
type verdict int

const (
	likely  verdict = iota // it depends on the randomness of the token
	certain                // a checksum is right
	refuted                // it is something else
)

// checksum62 checks tokens of GitHub and npm, which end in the CRC-32 of the
// rest in base 62. A wrong checksum refutes nothing: older tokens have none.
func checksum62(token string) verdict {
	_, body, _ := strings.Cut(token, "_")
	const base62 = digits + upper + lower
	sum, out := crc32.ChecksumIEEE([]byte(body[:len(body)-6])), make([]byte, 6)
	for i := 5; i >= 0; i-- {
		out[i] = base62[sum%62]
		sum /= 62
	}
	if string(out) == body[len(body)-6:] {
		return certain
	}
	return likely
}

// jsonWebToken accepts three parts of which the first is a JSON header with a
// signature algorithm (RFC 7519). Unsigned tokens open nothing.
func jsonWebToken(token string) verdict {
	parts := strings.Split(token, ".")
	if len(parts) != 3 || len(parts[1]) < 4 || len(parts[2]) < 16 {
		return refuted
	}
	header, err := base64.RawURLEncoding.DecodeString(parts[0])
	if err != nil || !strings.Contains(string(header), `"alg"`) || strings.Contains(strings.ToLower(string(header)), `"none"`) {
		return refuted
	}
	return certain
}

// mixed refutes what has letters of one case only, such as a hash.
func mixed(token string) verdict {
	if strings.ContainsAny(token, upper) && strings.ContainsAny(token, lower) {
		return likely
	}
	return refuted
}

const (
	minEntropy = 2.8 // bits in each character; random tokens have 3.5 and more, "xxxxxxxx" and "YOUR_KEY_HERE" less
	nearby     = 80  // bytes between a word of near and the token
	minToken   = 18  // bytes of the shortest token that begins with a literal
)

// A segment is a part of a pattern: a literal, or characters of a set.
type segment struct {
	literal  string
	set      string
	min, max int
}

// A pattern is a sequence of segments.
type pattern struct {
	rule     *tokenRule
	segments []segment
	mark     int // the longest literal, by which it is found; -1 if there is none
}

// tokenIndex is the table, ready for use.
type tokenIndex struct {
	byPrefix map[string][]pattern // patterns that begin with a literal of token characters, by its first two bytes
	byMark   []pattern            // patterns with another literal
	byWord   []named              // patterns that need a word nearby
}

// named are the patterns that need one word nearby.
type named struct {
	word     string
	patterns []pattern
}

// tokenPatterns compiles the table at its first use: each process of a sandbox
// is this program, and most never scan.
var tokenPatterns = sync.OnceValue(func() *tokenIndex {
	x := &tokenIndex{byPrefix: map[string][]pattern{}}
	for i := range tokenRules {
		r := &tokenRules[i]
		var all []pattern
		for _, text := range r.patterns {
			all = append(all, compile(r, text))
		}
		for _, w := range r.near {
			x.byWord = append(x.byWord, named{w, all})
		}
		if len(r.near) > 0 {
			continue
		}
		for _, p := range all {
			first := p.segments[0].literal
			switch {
			case len(first) > 1 && strings.Trim(first, alnum+"-_.~") == "":
				x.byPrefix[first[:2]] = append(x.byPrefix[first[:2]], p)
			default:
				x.byMark = append(x.byMark, p)
			}
		}
	}
	return x
})

// compile parses a pattern of the table. It panics if the pattern is malformed;
// a test compiles all.
func compile(r *tokenRule, text string) pattern {
	p := pattern{rule: r, mark: -1}
	for text != "" {
		literal, rest, found := strings.Cut(text, "{")
		if literal != "" {
			if p.mark < 0 || len(literal) > len(p.segments[p.mark].literal) {
				p.mark = len(p.segments)
			}
			p.segments = append(p.segments, segment{literal: literal})
		}
		if !found {
			break
		}
		class, after, closed := strings.Cut(rest, "}")
		name, length, _ := strings.Cut(class, ":")
		low, high, ranged := strings.Cut(length, "-")
		if !ranged {
			high = low
		}
		s := segment{set: charsets[name], min: int(number(low)), max: int(number(high))}
		if !closed || s.set == "" || s.max < s.min || s.max == 0 {
			panic("malformed pattern of " + r.id + ": " + text) // unreachable
		}
		p.segments = append(p.segments, s)
		text = after
	}
	return p
}

// at returns where a token of p begins and ends whose segment number mark begins
// at i of text, or to 0. The token is not part of a longer run of its characters.
func (p pattern) at(text string, mark, i int) (from, to int) {
	from, to = i, i
	for k := mark - 1; k >= 0; k-- {
		s := p.segments[k]
		if s.literal != "" {
			if !strings.HasSuffix(text[:from], s.literal) {
				return 0, 0
			}
			from -= len(s.literal)
			continue
		}
		n := 0
		for from > 0 && (n < s.max || k == 0 && n == s.max) && strings.IndexByte(s.set, text[from-1]) >= 0 {
			from--
			n++
		}
		if n < s.min || n > s.max {
			return 0, 0
		}
	}
	for k := mark; k < len(p.segments); k++ {
		s := p.segments[k]
		if s.literal != "" {
			if !strings.HasPrefix(text[to:], s.literal) {
				return 0, 0
			}
			to += len(s.literal)
			continue
		}
		n, last := 0, k == len(p.segments)-1
		for to < len(text) && (n < s.max || last && n == s.max) && strings.IndexByte(s.set, text[to]) >= 0 {
			to++
			n++
		}
		for last && n > 0 && text[to-1] == '.' { // the end of a sentence
			to--
			n--
		}
		if n < s.min || n > s.max {
			return 0, 0
		}
	}
	return from, to
}

// judge reports text[from:to] unless it is a placeholder or refuted.
func (p pattern) judge(text string, from, to int, found func(match)) bool {
	token, detail := text[from:to], p.rule.what
	v := likely
	if p.rule.check != nil {
		v = p.rule.check(token)
	}
	switch v {
	case refuted:
		return false
	case certain:
		detail += ", valid"
	case likely:
		random := token
		for _, s := range p.segments {
			random = strings.Replace(random, s.literal, "", 1)
		}
		if extract.Entropy(random) < minEntropy || placeholder(random) {
			return false
		}
	}
	found(match{from, to, FlagSecret, p.rule.id, detail})
	return true
}

// tokens finds tokens by what they begin with.
func tokens(text string, found func(match)) {
	x := tokenPatterns()
	for i := 0; i < len(text); {
		if !tokenByte(text[i]) {
			i++
			continue
		}
		from := i
		for i < len(text) && (tokenByte(text[i]) || text[i] == '.') {
			i++
		}
		if i-from < 2 || len(text)-from < minToken {
			continue
		}
		for _, p := range x.byPrefix[text[from:from+2]] {
			if _, to := p.at(text, 0, from); to > 0 && p.judge(text, from, to, found) {
				break
			}
		}
	}
}

// markedTokens finds tokens that do not begin with what they are known by.
func markedTokens(text string, found func(match)) {
	for _, p := range tokenPatterns().byMark {
		mark := p.segments[p.mark].literal
		for i := 0; ; {
			j := strings.Index(text[i:], mark)
			if j < 0 {
				break
			}
			i += j
			if from, to := p.at(text, p.mark, i); to > 0 {
				p.judge(text, from, to, found)
			}
			i += len(mark)
		}
	}
}

// credentialWords say that a key follows. A name of a service alone does not:
// hashes and identifiers follow those, too.
var credentialWords = []string{"key", "token", "secret", "auth", "credential", "password", "="}

// namedTokens finds tokens that only the name of their service tells from a hash
// or an identifier.
func namedTokens(text string, found func(match)) {
	low := lowerASCII(text)
	for _, n := range tokenPatterns().byWord {
		for i := 0; ; {
			j := strings.Index(low[i:], n.word)
			if j < 0 {
				break
			}
			start := i + j
			i = start + len(n.word)
			if start > 0 && tokenByte(low[start-1]) && low[start-1] != '_' && low[start-1] != '-' { // "laws" is not "aws"
				continue
			}
			end := min(len(text), i+nearby)
			for at := announced(low, max(0, i-nearby/2), end); at < end; at++ {
				if at < i || tokenByte(text[at-1]) {
					continue
				}
				for _, p := range n.patterns {
					if strings.IndexByte(p.segments[0].set, text[at-1]) >= 0 {
						continue
					}
					if _, to := p.at(text, 0, at); to > 0 && (to == len(text) || !tokenByte(text[to])) && p.judge(text, at, to, found) {
						break
					}
				}
			}
		}
	}
}

// announced returns where the first credential word of low[from:to] ends, or to.
func announced(low string, from, to int) int {
	first := to
	for _, w := range credentialWords {
		if i := strings.Index(low[from:first], w); i >= 0 {
			first = from + i + len(w)
		}
	}
	return first
}
